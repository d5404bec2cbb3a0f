"""Cutting something into as many runs as there are ranks."""


def split(size: int, ranks: int, rank: int) -> range:
    """This rank's share of ``size`` things in their order: shares differ by one at most, the larger ones first.

    ``split(10, 4, 1)`` is 3 to 5: the shares have 3, 3, 2 and 2.
    """
    share, larger = divmod(size, ranks)
    start = rank * share + min(rank, larger)
    return range(start, start + share + (rank < larger))


def grouped_split(groups: int, each: int, ranks: int, rank: int) -> tuple[range, range]:
    """This rank's share of ``groups`` groups and of the ``each`` members that every group has, a group's together.

    ``grouped_split(2, 4, 4, 1)``, of 2 key heads that 4 query heads share each, is key head 0 and query heads 2 and 3:
    with more ranks than groups, several hold the same group and different members of it.

    Returns:
        Groups, and members counted over all groups.

    Raises:
        ValueError: There are more ranks than groups, but not as many for each group; or more than members.
    """
    if ranks <= groups:
        own = split(groups, ranks, rank)
        return own, range(own.start * each, own.stop * each)
    per_group = ranks // groups
    if ranks % groups or per_group > each:
        raise ValueError(f"{groups} groups of {each} cannot be split over {ranks} ranks")
    group, index = divmod(rank, per_group)
    members = split(each, per_group, index)
    return range(group, group + 1), range(group * each + members.start, group * each + members.stop)


def spread(run: range, size: int) -> range:
    """The elements of a run of things of ``size`` elements each: ``spread(range(2, 4), 64)`` is 128 to 255."""
    return range(run.start * size, run.stop * size)
