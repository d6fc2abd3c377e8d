"""`python3 -m verl.trainer.main_generation_server`: another public name of `verl.trainer.main_generation`."""

import sys

from verl.trainer.main_generation import main

if __name__ == "__main__":
    sys.exit(main())
