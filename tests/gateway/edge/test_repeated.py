from backends.api import ChatRequest, Surface
from gateway.edge.codec import Parsed
from gateway.edge.repeated import MOST_BODIES, MOST_BYTES, RepeatedBodies

PARSED = Parsed(ChatRequest({}), "auto")


def test_a_body_is_found_again_on_its_own_surface_only() -> None:
    bodies = RepeatedBodies()
    bodies.add(Surface.CHAT, b"{}", PARSED)
    assert bodies.get(Surface.CHAT, b"{}") is PARSED
    assert bodies.get(Surface.CHAT, b"{ }") is None
    assert bodies.get(Surface.EMBEDDINGS, b"{}") is None


def test_tensor_bodies_are_never_kept() -> None:
    bodies = RepeatedBodies()
    bodies.add(Surface.TENSOR, b"{}", PARSED)
    assert bodies.get(Surface.TENSOR, b"{}") is None


def test_memory_is_bounded() -> None:
    bodies = RepeatedBodies()
    bodies.add(Surface.CHAT, b"x" * (MOST_BYTES + 1), PARSED)
    assert bodies.get(Surface.CHAT, b"x" * (MOST_BYTES + 1)) is None
    for number in range(MOST_BODIES + 1):
        bodies.add(Surface.CHAT, str(number).encode(), PARSED)
    assert bodies.get(Surface.CHAT, b"0") is None
    assert bodies.get(Surface.CHAT, str(MOST_BODIES).encode()) is PARSED
