"""The embedding and the output head, tied and not."""

import torch
import torch.nn.functional as F

from requant.layers.embedding import Embedding, OutputHead
from requant.parallel import Placement

CPU = torch.device("cpu")


def _embedding() -> Embedding:
    embedding = Embedding("model.embed_tokens", 11, 4)
    embedding.build(torch.float32, CPU)
    embedding.weight.data.normal_()
    return embedding


def test_embedding_takes_rows():
    embedding = _embedding()
    ids = torch.tensor([3, 0, 10, 3])
    torch.testing.assert_close(embedding(ids), embedding.weight.data[ids], rtol=0, atol=0)
    assert embedding.placements == (Placement("model.embed_tokens.weight", (11, 4)),)


def test_an_untied_head_is_a_protected_linear():
    head = OutputHead("lm_head", 11, 4)
    assert head.placements == (Placement("lm_head.weight", (11, 4)),)
    assert (head.names.module, head.names.parts, head.names.protected) == ("lm_head", ("lm_head",), "lm_head")
    assert not head.tied
    head.build(None, torch.float32, CPU)
    assert head.weight.shape == (11, 4)


def test_a_tied_head_kept_unquantized_uses_the_embedding_in_place():
    embedding = Embedding("model.embed_tokens", 11, 4)
    head = OutputHead("lm_head", 11, 4, tied_to=embedding)
    head.build(None, torch.float32, CPU)
    head.finish()
    embedding.build(torch.float32, CPU)
    embedding.weight.data.normal_()
    assert head.tied
    assert not list(head.parameters())
    assert not list(head.children())
    x = torch.randn(3, 4)
    torch.testing.assert_close(head(x), F.linear(x, embedding.weight))
    embedding.weight.data.neg_()
    torch.testing.assert_close(head(x), F.linear(x, embedding.weight))


def test_a_tied_head_names_the_embeddings_tensor_and_itself():
    head = OutputHead("lm_head", 11, 4, tied_to=_embedding())
    assert head.placements == (Placement("model.embed_tokens.weight", (11, 4)),)
    assert head.names.parts == ("lm_head",)
