import pytest

from requant.parallel.split import grouped_split, split


@pytest.mark.parametrize("size", [1, 2, 7, 96, 129])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_shares_cover_everything_once_and_differ_by_one_at_most(size, ranks):
    shares = [split(size, ranks, rank) for rank in range(ranks)]
    assert [i for share in shares for i in share] == list(range(size))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(("groups", "each", "ranks"), [(2, 4, 1), (2, 4, 2), (3, 3, 2), (5, 2, 4), (8, 1, 8)])
def test_up_to_as_many_ranks_as_groups_share_whole_groups(groups, each, ranks):
    shares = [grouped_split(groups, each, ranks, rank) for rank in range(ranks)]
    assert [g for own, _ in shares for g in own] == list(range(groups))
    assert [m for _, members in shares for m in members] == list(range(groups * each))
    assert all(len(members) == each * len(own) for own, members in shares)


@pytest.mark.parametrize(("groups", "each", "ranks"), [(2, 4, 4), (2, 4, 8), (1, 5, 3), (3, 3, 6)])
def test_more_ranks_than_groups_hold_the_same_group_and_other_members(groups, each, ranks):
    shares = [grouped_split(groups, each, ranks, rank) for rank in range(ranks)]
    assert [m for _, members in shares for m in members] == list(range(groups * each))
    for own, members in shares:
        assert len(own) == 1
        assert all(member // each == own[0] for member in members)
        assert members


@pytest.mark.parametrize(("groups", "each", "ranks"), [(2, 4, 3), (2, 4, 16), (3, 1, 6)])
def test_what_cannot_be_split_is_refused(groups, each, ranks):
    with pytest.raises(ValueError, match=f"over {ranks} ranks"):
        grouped_split(groups, each, ranks, 0)
