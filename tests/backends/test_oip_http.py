"""The OIP backend against a real socket."""

import numpy as np
import pytest

from backends.api import Tensor, TensorRequest
from backends.oip_wire import HEADER_LENGTH
from policies.core.errors import (
    CannotServe,
    ClientFault,
    GatewayError,
    InBandError,
    MalformedAnswer,
    UpstreamMisconfigured,
    UpstreamStatus,
)
from tests.support.upstream import oip_backend, question, scripted_upstream, soon


def request() -> TensorRequest:
    words = np.array([b"a", "é".encode()], dtype=object)
    inputs = [
        Tensor("x", "FP32", np.float32([[1, np.nan]])),
        Tensor("w", "BYTES", words),
        Tensor("h", "FP16", np.float16([2])),
    ]
    return TensorRequest("alias", inputs, outputs=("x", "w", "h"), parameters={"k": 1}, id="r1")


async def test_tensors_go_there_and_back_in_binary() -> None:
    async with scripted_upstream() as up:
        backend = oip_backend(up.url, credential="sk-ours")
        answer = await backend.infer(request(), soon())
        assert [(tensor.name, tensor.datatype) for tensor in answer.outputs] == [
            ("x", "FP32"),
            ("w", "BYTES"),
            ("h", "FP16"),
        ]
        np.testing.assert_array_equal(answer.outputs[0].data, request().inputs[0].data)
        assert answer.outputs[1].data.tolist() == [b"a", "é".encode()]
        seen = up.last("ok")
        assert seen.path == "/v2/models/ok/infer"
        assert seen.headers["authorization"] == "Bearer sk-ours"
        assert HEADER_LENGTH.lower() in seen.headers
        assert seen.body["parameters"] == {"k": 1, "binary_data_output": True}
        assert up.connections_made == 1
        await backend.aclose()


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("error", UpstreamStatus),
        ("bad-input", ClientFault),
        ("error-first", InBandError),
        ("malformed", MalformedAnswer),
        ("empty", MalformedAnswer),
        ("status-404", UpstreamMisconfigured),
    ],
)
async def test_each_fault_is_its_error(model: str, error: type[GatewayError]) -> None:
    from backends.scripted_models import MODELS

    async with scripted_upstream(**{"status-404": MODELS["status-404"](False, {})}) as up:
        backend = oip_backend(up.url, model)
        with pytest.raises(error) as caught:
            await backend.infer(request(), soon())
        assert type(caught.value) is error
        assert caught.value.backend == "heavy"  # type: ignore[attr-defined]
        assert backend.in_flight == 0
        await backend.aclose()


async def test_tensors_do_not_stream() -> None:
    backend = oip_backend("http://127.0.0.1:9")
    with pytest.raises(CannotServe):
        await anext(backend.stream(question(), soon()))
    await backend.aclose()
