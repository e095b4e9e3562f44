"""Stages in processes of their own, over Unix sockets and over TCP."""

import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from time import monotonic

import msgspec
import pytest
import stage_child
from channel_ends import HOST
from pipelines import INSTANCE

from pilotlight.engine.channel.channel import Frame
from pilotlight.engine.channel.door import Door
from pilotlight.engine.channel.unix import UnixChannel
from pilotlight.engine.kv_pieces import KvPiece
from pilotlight.engine.pipeline.frames import tensor_of, unpack
from pilotlight.engine.pipeline.joining import join
from pilotlight.policy.ids import RequestId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import FinishReason, RequestKey

pytestmark = pytest.mark.slow

STEPS_S = 100


@contextmanager
def stage_processes(model, stages, leader, folder, over="unix"):
    """Starts all stages but the first one, and connects the leader; gives processes and control
    channels.
    """
    stage_child.store(model, folder)
    processes, controls = [], []
    connects = {"unix": connected_by_unix, "tcp": connected_by_tcp}[over]

    def start(stage, *fds, **pipes):
        mine, its = socket.socketpair()
        command = [
            sys.executable,
            stage_child.__file__,
            folder,
            stage.start,
            stage.stop,
            its.fileno(),
            *fds,
        ]
        processes.append(
            subprocess.Popen([*map(str, command)], pass_fds=[its.fileno(), *fds], **pipes)
        )
        controls.append(UnixChannel(mine, monotonic))
        its.close()
        return processes[-1]

    try:
        leader.engine.connect(INSTANCE, *connects(stages, start))
        deadline = monotonic() + 60
        while not leader.engine.serves(INSTANCE):
            assert not leader.step().lost
            assert monotonic() < deadline
        yield processes, controls
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout)):
                pipe.close()
        for control in controls:
            control.close()


def connected_by_unix(stages, start):
    ring = [socket.socketpair() for _ in stages]
    for index, stage in enumerate(stages[1:], start=1):
        start(stage, ring[index - 1][1].fileno(), ring[index][0].fileno())
        ring[index - 1][1].close()
        ring[index][0].close()
    return UnixChannel(ring[-1][1], monotonic), UnixChannel(ring[0][0], monotonic)


def connected_by_tcp(stages, start):
    children = [
        start(stage, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for stage in stages[1:]
    ]
    me = stage_child.identity(stages[0])
    door = Door(me, (HOST, 0), monotonic)
    ports = [door.port, *(int(child.stdout.readline()) for child in children)]
    ring = [*zip(stages, ports, strict=True)]
    following = [*ring[1:], ring[0]]
    for child, (stage, port) in zip(children, following[1:], strict=True):
        print(stage.start, stage.stop, port, file=child.stdin, flush=True)
    channels = join(
        door, me, INSTANCE, stages[0], stage_child.follows(*following[0]), monotonic, 30
    )
    door.close()
    return channels


@pytest.fixture
def long_clock(monkeypatch):
    """The driver's clock ticks with every look, and a leader that waits looks often."""
    monkeypatch.setattr("pilotlight.engine.pipeline.lead.ANSWER_TIMEOUT_S", 1e9)


def until(runs, condition):
    """Steps until it holds; what stages in other processes fail to say would never end a leader
    that waits by a clock of its own.
    """
    deadline = monotonic() + STEPS_S
    while not condition():
        assert monotonic() < deadline, runs.outputs
        runs.step()


def finish(runs):
    until(runs, lambda: all(output.finish is not None for output in runs.outputs.values()))


@pytest.mark.parametrize(
    ("kind", "lengths", "over"),
    [
        ("gemma3", (2, 2), "unix"),
        ("qwen3-moe", (1, 1, 1, 1), "unix"),
        ("gemma3", (2, 2), "tcp"),
        ("llama", (1, 2, 1), "tcp"),
        ("qwen3-moe", (1, 1, 1, 1), "tcp"),
    ],
)
def test_tokens_are_those_of_transformers(
    kind, lengths, over, checkpoint, driver, prompts, tmp_path, long_clock
):
    model, leader = checkpoint(kind, 1), driver()
    stages = [
        Stage(sum(lengths[:index]), sum(lengths[: index + 1])) for index in range(len(lengths))
    ]
    leader.load(model, stage=stages[0])
    with stage_processes(model, stages, leader, tmp_path, over):
        for index, prompt in enumerate(prompts):
            leader.add(str(index), prompt, max_tokens=64)
        finish(leader)
    for index, prompt in enumerate(prompts):
        output = leader.outputs[str(index)].token_ids
        assert len(output) == 64
        assert output == model.would_say(prompt, output)


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_a_request_moves_out_of_a_pipeline_that_then_dies(
    over, checkpoint, driver, prompts, tmp_path, long_clock
):
    model, leader, survivor = checkpoint("llama", 1), driver(), driver()
    stages = [Stage(0, 1), Stage(1, 3), Stage(3, 4)]
    leader.load(model, stage=stages[0])
    leader.load(model, "beside")
    survivor.load(model)
    key = RequestKey(RequestId("moves"), 1)
    with stage_processes(model, stages, leader, tmp_path, over) as (processes, controls):
        leader.add("moves", prompts[2], max_tokens=60)
        leader.add("stays", prompts[1], max_tokens=60)
        leader.add("other", prompts[0], instance="beside", max_tokens=60)
        until(leader, lambda: len(leader.outputs["moves"].token_ids) >= 20)
        pieces = list(leader.engine.export_kv(INSTANCE, [key], stages[0]))
        for control in controls:
            control.send(Frame(msgspec.msgpack.encode(key), memoryview(b"")), 1)
            while (frame := control.receive(10)).header:
                header = unpack(frame)
                tensor = tensor_of(frame, header.tensor)
                pieces.append(
                    KvPiece(
                        key=key, layers=header.layers, start=header.start, keys_and_values=tensor
                    )
                )
        assert {piece.layers for piece in pieces} == set(stages)
        released = leader.engine.release(key.request_id, 1)
        survivor.outputs["moves"] = leader.outputs.pop("moves")
        survivor.engine.add(
            key.request_id,
            1,
            INSTANCE,
            released.prompt_ids,
            released.output_ids,
            released.sampling,
            None,
            pieces,
        )
        assert survivor.step().batch_tokens <= 3, "what was under way in the pipeline at most"
        until(leader, lambda: len(leader.outputs["stays"].token_ids) >= 30)
        processes[0].send_signal(signal.SIGKILL)
        finish(leader)
        assert processes[1].wait(20) == 0, "it noticed, and ended by itself"
    stays = leader.outputs["stays"]
    assert (stays.finish, stays.code) == (FinishReason.ERROR, "worker_lost")
    assert stays.token_ids == model.greedy(prompts[1], 60)[: len(stays.token_ids)]
    assert leader.outputs["other"].token_ids == model.greedy(prompts[0], 60)
    survivor.add("stays again", prompts[1], stays.token_ids, max_tokens=60)
    outputs = survivor.finish()
    assert outputs["moves"] == model.greedy(prompts[2], 60)
    assert outputs["stays again"] == model.greedy(prompts[1], 60)
