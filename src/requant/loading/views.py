"""Views of one piece of memory that lie behind each other, as one."""

from collections.abc import Sequence

from torch import Tensor


def follows(before: Tensor, view: Tensor) -> bool:
    """Whether a view begins where another one, of the same dtype, ends; both without holes."""
    return (
        before.data_ptr() + before.nbytes == view.data_ptr()
        and before.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        and before.is_contiguous()
        and view.is_contiguous()
    )


def joined(views: Sequence[Tensor]) -> Tensor:
    """Views each of which :func:`follows` the one before, as one that is flat."""
    first = views[0]
    return first.as_strided((sum(view.numel() for view in views),), (1,), first.storage_offset())
