from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.onnx.manifest import ModelDamaged
from backends.onnx.tokens import group_by_length, head_and_tail, padded, read_tokenizer

lengths = st.lists(st.integers(1, 512), max_size=200)


@given(lengths)
def test_groups_hold_every_row_once(rows: list[int]) -> None:
    assert sorted(index for run in group_by_length(rows) for index in run) == list(range(len(rows)))


@given(lengths)
def test_groups_pad_little_and_stay_small(rows: list[int]) -> None:
    for run in group_by_length(rows):
        longest = max(rows[index] for index in run)
        assert len(run) == 1 or longest * len(run) <= 1024
        # What is padded is never worth more than the runs it saves.
        padding = sum(longest - rows[index] for index in run)
        assert padding <= 4 * (len(run) - 1)


def test_equal_lengths_share_a_run() -> None:
    assert group_by_length([7] * 20) == [list(range(20))]


def test_a_long_row_gets_a_run_of_its_own() -> None:
    assert group_by_length([10, 200, 10]) == [[0, 2], [1]]


@given(st.lists(st.integers(0, 99), max_size=50), st.integers(2, 30))
def test_cutting_keeps_both_ends(ids: list[int], limit: int) -> None:
    cut = head_and_tail(ids, limit)
    assert len(cut) == min(len(ids), limit)
    if len(ids) > limit:
        assert cut[0] == ids[0] and cut[-1] == ids[-1]
        assert cut == ids[: (limit + 1) // 2] + ids[len(ids) - limit // 2 :]
    else:
        assert cut == ids


def test_padding_is_masked() -> None:
    feed = padded([[5, 6], [7]])
    assert feed["input_ids"].tolist() == [[5, 6], [7, 0]]
    assert feed["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert feed["input_ids"].dtype == feed["attention_mask"].dtype == np.int64


def test_a_tokenizer_file_that_cuts_and_pads_does_neither(tiny_weights: Path) -> None:
    tokenizer = read_tokenizer(tiny_weights / "tokenizer.json")
    assert len(tokenizer.encode("tent").ids) == 3
    assert len(tokenizer.encode("tent " * 40).ids) == 42


def test_a_file_that_is_no_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelDamaged, match="is no tokenizer"):
        read_tokenizer(tmp_path / "tokenizer.json")
