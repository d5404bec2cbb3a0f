import random

import pytest

from requant.engine.block_pool import ROOT_KEY, BlockPool, chain_key


def key(*tokens: int) -> bytes:
    return chain_key(ROOT_KEY, tokens)


def test_key_depends_on_all_tokens_before() -> None:
    assert key(1, 2) == key(1, 2)
    assert key(1, 2) != key(2, 1)
    assert chain_key(key(1, 2), (5, 6)) == chain_key(key(1, 2), (5, 6))
    assert chain_key(key(1, 2), (5, 6)) != chain_key(key(1, 3), (5, 6))
    assert chain_key(key(1, 2), (3, 4)) != key(1, 2, 3, 4)
    assert key(258) != key(2, 1)


def test_allocates_every_block_once() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert pool.usage == 0.75
    blocks += pool.allocate(1)
    assert sorted(blocks) == [0, 1, 2, 3]
    assert (pool.num_free, pool.usage) == (0, 1.0)
    with pytest.raises(ValueError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)


def test_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, key(1))
    pool.hold([block])
    assert pool.holders(block) == 2
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2


def test_released_block_is_found_and_held_again() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, key(1))
    pool.release([block])
    assert pool.find([key(1)]) == [block]
    pool.hold([block])
    assert (pool.num_free, pool.holders(block)) == (1, 1)


def test_find_stops_at_the_first_unknown_key() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    keys = [key(1), key(2), key(3)]
    pool.publish(blocks[0], keys[0])
    pool.publish(blocks[2], keys[2])
    assert pool.find(keys) == [blocks[0]]
    assert pool.find([]) == []


def test_first_block_of_a_key_stays() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, key(1))
    pool.publish(second, key(1))
    pool.release([second])
    assert pool.allocate(1) == [second]
    assert pool.find([key(1)]) == [first]


def test_evicts_least_recently_released_first_and_ends_before_beginnings() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for i, block in enumerate(old + new):
        pool.publish(block, key(i))
    pool.release(old)
    pool.release(new)
    assert [pool.allocate(1)[0] for _ in range(4)] == [old[1], old[0], new[1], new[0]]
    assert all(pool.find([key(i)]) == [] for i in range(4))


def test_use_renews() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, key(1))
    pool.publish(second, key(2))
    pool.release([first])
    pool.release([second])
    pool.hold([first])
    pool.release([first])
    assert pool.allocate(1) == [second]


def test_blocks_that_cannot_be_found_go_first() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, key(1))
    pool.release([first])
    pool.release([second])
    assert pool.allocate(1) == [second]


def test_can_serve_counts_found_blocks_that_are_free() -> None:
    pool = BlockPool(3)
    held, free = pool.allocate(2)
    pool.publish(held, key(1))
    pool.publish(free, key(2))
    pool.release([free])
    found = pool.find([key(1), key(2)])
    assert pool.num_free == 2
    assert pool.can_serve(found, 1)
    assert not pool.can_serve(found, 2)
    assert not pool.can_serve(found, 1, spare=1)


def test_caching_can_be_off() -> None:
    pool = BlockPool(2, caching=False)
    (block,) = pool.allocate(1)
    pool.publish(block, key(1))
    assert pool.find([key(1)]) == []


@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(12)
    held: list[list[int]] = []
    for _ in range(300):
        action = rng.random()
        if action < 0.4:
            found = pool.find([key(rng.randrange(6)) for _ in range(rng.randrange(3))])
            found = list(dict.fromkeys(found))
            new = rng.randrange(4)
            if pool.can_serve(found, new):
                pool.hold(found)
                fresh = pool.allocate(new)
                assert not set(fresh) & {block for blocks in held for block in blocks}
                held.append(found + fresh)
        elif action < 0.7 and held:
            block = rng.choice(rng.choice(held) or [0])
            if pool.holders(block) == 1 and pool._keys[block] is None:
                pool.publish(block, key(rng.randrange(6)))
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        for block in range(12):
            assert pool.holders(block) == sum(blocks.count(block) for blocks in held)
        assert pool.num_free == sum(pool.holders(block) == 0 for block in range(12))
        assert all(pool._keys[block] == k for k, block in pool._by_key.items())
    for blocks in held:
        pool.release(blocks)
    assert pool.num_free == 12
