"""The block pool never hands a block out twice, and finds only what it was told a block holds."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsc.runtime.cache import BlockPool, LatentCache, block_key, choose_num_blocks, free_memory_bytes
from dsc.runtime.errors import DscError

NUM_BLOCKS = 9


class PoolMachine(RuleBasedStateMachine):
    """Sequences take, share, remember and give back blocks in any order; a model of sets follows."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[list[int]] = []
        self.content: dict[bytes, int] = {}  # key -> block that must hold it, as long as the pool finds it

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def take(self, count: int) -> None:
        free = self.pool.num_free
        taken = self.pool.take(count)
        assert (taken is None) == (count > free)
        if taken is not None:
            assert len(set(taken)) == count
            assert not {*taken} & {b for blocks in self.held for b in blocks}
            self.content = {key: b for key, b in self.content.items() if b not in taken}
            self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        self.pool.give(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), key=st.binary(min_size=1, max_size=1))
    def remember(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from([b for blocks in self.held for b in blocks]))
        if key not in self.content:
            self.content = {k: b for k, b in self.content.items() if b != block}
            self.content[key] = block
        self.pool.remember(block, key)

    @rule(keys=st.lists(st.binary(min_size=1, max_size=1), max_size=4, unique=True))
    def find(self, keys: list[bytes]) -> None:
        found = self.pool.find(keys)
        assert found == [self.content[key] for key in keys[: len(found)]]
        assert len(found) == len(keys) or keys[len(found)] not in self.content
        self.held.append(found)

    @invariant()
    def counts_agree(self) -> None:
        held = [b for blocks in self.held for b in blocks]
        assert self.pool.num_free == NUM_BLOCKS - len(set(held))
        assert [self.pool.holders(b) for b in range(NUM_BLOCKS)] == [held.count(b) for b in range(NUM_BLOCKS)]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, deadline=None)


def test_the_longest_unused_block_goes_first_and_beginnings_last():
    pool = BlockPool(4)
    first, second = pool.take(2), pool.take(1)
    for block, key in zip(first, (b"a", b"b"), strict=True):
        pool.remember(block, key)
    pool.give(first)
    pool.give(second)
    assert pool.take(1) == second  # it holds nothing worth keeping
    assert pool.take(1) == [3]
    assert pool.take(1) == [first[1]]  # the end of a text is of use only behind its beginning
    assert pool.find([b"a", b"b"]) == [first[0]]


def test_giving_a_free_block_is_an_error():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 1 is free already"):
        pool.give([1])


def test_keys_depend_on_all_tokens_before():
    a = block_key(b"", [1, 2])
    assert a == block_key(b"", [1, 2])
    assert len({a, block_key(b"", [2, 1]), block_key(a, [1, 2]), block_key(b"", [1, 2, 3])}) == 4


def test_cache_tensors_are_clear_and_cleared():
    cache = LatentCache.allocate({"cache.0": 8, "cache.4": 8}, block_tokens=4, num_blocks=3)
    assert cache.capacity_tokens == 12
    assert cache.nbytes == 48
    assert [cache.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    for tensor in cache.tensors.values():
        assert not tensor.any()
        tensor.fill_(255)
    cache.clear([0, 2])
    for tensor in cache.tensors.values():
        assert torch.equal(tensor[:, 0], torch.tensor([0, 255, 0], dtype=torch.uint8))


def test_number_of_blocks():
    much = 10**9
    assert choose_num_blocks(4, 100, 16, 10, much) == 4 * 7
    assert choose_num_blocks(4, 100, 16, 10, 30, wanted_tokens=33) == 3
    assert choose_num_blocks(4, 100, 16, 10, 0, wanted_tokens=33, may_swap=True) == 3
    assert choose_num_blocks(4, 100, 16, 10, much, wanted_tokens=10**9) == 4 * 7
    assert choose_num_blocks(4, 100, 16, 10, 155) == 15
    assert choose_num_blocks(4, 100, 16, 10, 70) == 7  # one sequence
    with pytest.raises(DscError, match="cache_tokens of 1 or more"):
        choose_num_blocks(4, 100, 16, 10, much, wanted_tokens=0)


def test_a_cache_without_room_is_refused_with_the_numbers():
    with pytest.raises(DscError) as error:
        choose_num_blocks(4, 100, 16, 1000, 6999, weight_bytes=12345, may_swap=True, where="x.engine")
    assert error.value.text().splitlines() == [
        "x.engine: weights and cache do not fit together",
        "  weights  12,345 bytes",
        "  cache    7,000 bytes: one sequence of 100 tokens",
        "  wanted   7,000 bytes for the cache",
        "  got      6,999 bytes free for it beside the weights",
        "  try      cache_tokens 96",
    ]
    with pytest.raises(DscError) as error:
        choose_num_blocks(4, 100, 16, 1000, 999, wanted_tokens=17)
    assert "2,000 bytes: cache_tokens 17\n" in error.value.text()
    assert "try      a recipe with fewer bits, or more memory" in error.value.text()


def test_free_memory_is_a_number_of_this_machine():
    assert 1 << 20 < free_memory_bytes() < 1 << 50
