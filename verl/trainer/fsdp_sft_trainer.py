"""`python3 -m verl.trainer.fsdp_sft_trainer`: the older name of `verl.trainer.sft_trainer`."""

import sys

from verl.trainer.sft_trainer import main

if __name__ == "__main__":
    sys.exit(main())
