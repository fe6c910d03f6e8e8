"""`gateway load` as a process: exit codes, output, Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import pytest
from typer.testing import CliRunner

from gateway.cli.load import app
from tests.support.load_target import Answer, LoadTarget

PROGRAM = [sys.executable, "-c", "from gateway.cli.load import app; app()"]
SHORT = ["--arrivals", "constant", "--rate", "40", "--duration", "250ms", "--stream", "0%", "--max-lag", "30s"]


async def start(*arguments):
    return await asyncio.create_subprocess_exec(
        *PROGRAM, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def load(*arguments):
    process = await start(*arguments)
    out, errors = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, out.decode(), errors.decode()


async def test_a_good_run_prints_one_json_object_and_exits_0():
    async with LoadTarget() as target:
        code, out, _ = await load(target.url, "--json", *SHORT, "--max-failed", "1%")
    document = json.loads(out)
    assert (code, document["exit_code"], document["sent"], document["valid"]) == (0, 0, 10, True)
    assert out.count("\n") == 1


async def test_without_json_it_prints_a_page():
    async with LoadTarget() as target:
        code, out, errors = await load(target.url, *SHORT, "--max-p99", "30s")
    assert code == 0 and errors == ""
    assert "latency" in out and "full 10" in out and "ok   latency_p99_ms" in out


async def test_a_broken_limit_exits_1_and_a_dropped_send_4():
    async with LoadTarget(lambda _: Answer(503)) as target:
        over, drop = await asyncio.gather(
            load(target.url, *SHORT, "--max-failed", "1%"),
            load(target.url, *SHORT, "--max-lag", "0s"),
        )
    assert over[0] == 1 and "OVER failed_share 1" in over[1]
    assert drop[0] == 4 and "INVALID" in drop[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["http://203.0.113.1"], "--allow-remote"),
        (["--arrivals", "tidal"], "constant, poisson, gamma"),
        (["--duration", "10"], "no unit"),
        (["--rate", "-1"], "rate"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv"),
        (["--heavy", "130%"], "100%"),
        (["--mix", "soup"], "chat, tensor"),
    ],
)
def test_bad_arguments_exit_2_with_a_word_of_help(arguments, words):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and done.stdout == "" and words in done.stderr


async def test_ctrl_c_ends_with_a_report():
    async with LoadTarget() as target:
        process = await start(target.url, "--json", "--duration", "1h", "--rate", "100", "--stream", "0%")
        while target.requests < 3:
            target.arrived.clear()
            await asyncio.wait_for(target.arrived.wait(), 20)
        process.send_signal(signal.SIGINT)
        out, _ = await asyncio.wait_for(process.communicate(), 10)
    document = json.loads(out)
    assert process.returncode == 130 and document["interrupted"] and document["sent"] >= 3


async def test_keys_come_from_a_file_and_never_show(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("vip: {key: gw-secret-1, share: 0.5}\nnormal: {key: gw-secret-2, share: 0.5}\n")
    async with LoadTarget() as target:
        code, out, errors = await load(target.url, "--keys", str(keys), *SHORT)
        assert set(target.authorizations) == {"Bearer gw-secret-1", "Bearer gw-secret-2"}
    assert code == 0 and "secret" not in out + errors
    keys.write_text("vip: {key: 7, share: [gw-secret-1]}")
    done = CliRunner().invoke(app, ["--keys", str(keys)])
    assert done.exit_code == 2 and "vip" in done.stderr and "secret" not in done.output
