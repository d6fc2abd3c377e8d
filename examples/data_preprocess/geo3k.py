"""`verl prepare geo3k` as a script; --help shows the flags."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from verl.data.prepare import run

if __name__ == "__main__":
    sys.exit(run("geo3k"))
