"""`python -m ecorec_torchrec.cli`, for torchrun."""

from ecorec_torchrec.cli.main import main

if __name__ == "__main__":
    main()
