"""A reward that costs nothing and differs between responses, for both sides of a benchmark."""

import zlib


def score_text(text: str) -> float:
    return (zlib.crc32(text.encode()) % 1000) / 1000.0


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return score_text(solution_str)
