"""What changed in the buckets of a broadcast since the last one: `checkpoint_engine.backend=delta_sharded`.

Sender and relays keep the buckets of the last transfer that all of them completed. Of a bucket that is there with the
same header, the 16-bit words that differ travel, each with the gap before it in one byte; 3 bytes for a changed word of
2, so a bucket of which two thirds or more changed travels whole. What arrives is the sender's bucket, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_WORD = torch.int16
_MOST_GAP = 255


@dataclass(slots=True)
class SentBuckets:
    """One side's buckets of the last transfer, in host memory. token: names that transfer; "": there is none, or it
    did not reach everybody."""

    token: str = ""
    _buckets: list[tuple[bytes, torch.Tensor]] = field(default_factory=list)

    def forget(self) -> None:
        """The next transfer sends everything."""
        self.token = ""
        self._buckets.clear()

    def words(self, number: int) -> torch.Tensor:
        """The 16-bit words of bucket `number`, int16 [W]."""
        return self._buckets[number][1]

    def store(self, number: int, header: bytes, bucket: torch.Tensor) -> None:
        """Bucket `number` of this transfer travelled whole; uint8 [even]."""
        self._buckets[number : number + 1] = [(header, bucket.view(_WORD).clone())]

    def changes(self, number: int, header: bytes, bucket: torch.Tensor) -> torch.Tensor | None:
        """What to send for uint8 [even], bucket `number`: uint8 [3·c] of c words, their values first, then the gaps.
        None: the bucket itself. It is stored either way."""
        same = number < len(self._buckets) and self._buckets[number][0] == header
        if not (same and self.words(number).numel() * 2 == bucket.numel()):
            self.store(number, header, bucket)
            return None
        old, new = self.words(number), bucket.view(_WORD)
        changed = old != new
        if changed.any():
            changed[_MOST_GAP - 1 :: _MOST_GAP] = True  # no gap needs more than a byte
        places = changed.nonzero().flatten()
        old.copy_(new)
        if 3 * len(places) >= bucket.numel():
            return None
        gaps = torch.diff(places, prepend=places.new_tensor([-1])).to(torch.uint8)
        return torch.cat((new[places].view(torch.uint8), gaps))

    def apply(self, number: int, changes: torch.Tensor) -> torch.Tensor:
        """Bucket `number` after the sender's changes, uint8 [even]."""
        count = changes.numel() // 3
        places = changes[2 * count :].long().cumsum(0) - 1
        self.words(number)[places] = changes[: 2 * count].view(_WORD)
        return self.words(number).view(torch.uint8)
