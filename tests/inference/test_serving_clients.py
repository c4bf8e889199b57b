"""Authentication, rate limits and time limits of a server, and its access log and traces."""

from __future__ import annotations

import http.client
import json
import re
import ssl
from pathlib import Path
from typing import Any

import pytest

from deepspeed.inference.serving.clients import Certificate, RateLimit, access_log, owner_of, read_keys
from deepspeed.tools import ds, serve_options
from tests.inference.standin import Parrot

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from deepspeed.inference.serving.listening import LoadingAnswers
from tests.inference.test_http import Running, server
from tests.inference.test_service import wait_for

ASKED = {"prompt": "a", "max_tokens": 3}

CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgy0OV/Tp3xLlcokub
l+eHuOQV0awcsHYa+tVS/M0t0YahRANCAATDLyMeEDErbl9qk4Pwa0Jmx1eX7IuY
i5E7ANzs2lAVDum57racnh6ZdBnrq2SMrBpw/RIvvb3YNoDshGEhuvvp
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBnDCCAUGgAwIBAgIUFrYO9RcLnK7MzuKF8Qz4ve+FLTYwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEzMDAxNTMzMVoYDzIxMjYxMTA2
MDE1MzMxWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATDLyMeEDErbl9qk4Pwa0Jmx1eX7IuYi5E7ANzs2lAVDum57racnh6Z
dBnrq2SMrBpw/RIvvb3YNoDshGEhuvvpo28wbTAdBgNVHQ4EFgQU4NuJ8x7Ibo/E
yzAOrzVDPW1sx30wHwYDVR0jBBgwFoAU4NuJ8x7Ibo/EyzAOrzVDPW1sx30wDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARhwR/AAABgglsb2NhbGhvc3QwCgYIKoZI
zj0EAwIDSQAwRgIhAPHDKo4P3G5cIeksynZpsMDSOQTnWhZAE8npulWh/Y8DAiEA
rV4fo2SzUxW7CF5xSj0j2c1DsroYEVnnY7S24AWEats=
-----END CERTIFICATE-----
"""
"""For 127.0.0.1, with its key; until the year 2126."""


def headers_of(running: Running, **given: str) -> tuple[int, dict[str, str]]:
    """The status and the headers of an answer, by lower-case names."""
    connection = running.connect()
    connection.request("POST", "/v1/completions", json.dumps(ASKED), given)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}


def test_keys_have_names(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# teams\n\nsearch  abc\nchat def\n")
    keys = read_keys(file)
    assert keys == {"search": "abc", "chat": "def"}
    assert owner_of("Bearer def", keys) == "chat" and owner_of("Bearer xyz", keys) is None
    with server(keys=keys, token="ours") as running:
        for key, status in (("abc", 200), ("def", 200), ("ours", 200), ("other", 401), ("", 401)):
            assert running.post(ASKED, Authorization=f"Bearer {key}")[0] == status
        adapter = {"lora_name": "x", "lora_path": "/x"}
        status, refused = running.post(adapter, "/v1/load_lora_adapter", Authorization="Bearer abc")
        assert status == 403 and "requires a server token" in refused["error"]["message"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("search", "line 1: 1 words"),
        ("a secret\nb secret", "line 2: the name 'b', or its key"),
        ("token secret", "line 1: the name 'token'"),
        ("a sécret", "not ASCII"),
        ("# nothing", "contains no key"),
    ],
)
def test_files_of_keys_that_are_refused(
    content: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text(content)
    assert ds.main(["serve", "model", "--api-key-file", str(tmp_path / "keys")]) == 2
    told = capsys.readouterr().err
    assert "--api-key-file" in told and problem in told and "cret" not in told


def test_the_rate_of_a_client() -> None:
    limit = RateLimit(3)
    assert [limit.take("a", 0.0) for _ in range(3)] == [0, 0, 0]
    assert limit.take("a", 0.0) == pytest.approx(20)
    assert limit.take("b", 0.0) == 0
    assert limit.take("a", 19.0) == pytest.approx(1) and limit.take("a", 20.0) == 0
    assert limit.take("a", 20.0) == pytest.approx(20)
    assert [limit.take("a", 1e4) for _ in range(3)] == [0, 0, 0]  # never more than a minute's
    seldom = RateLimit(0.5)
    assert [seldom.take("a", at) for at in (0.0, 60.0, 120.0)] == [0, pytest.approx(60), 0]

    with server(keys={"search": "abc", "chat": "def"}, requests_per_minute=2) as running:
        for _ in range(2):
            assert headers_of(running, Authorization="Bearer abc")[0] == 200
        status, headers = headers_of(running, Authorization="Bearer abc")
        assert status == 429 and 1 <= int(headers["retry-after"]) <= 30
        assert headers_of(running, Authorization="Bearer def")[0] == 200
        assert running.call("GET", "/health")[0] == 200


def test_a_request_that_takes_too_long_is_ended() -> None:
    slow = {"prompt": "a", "max_tokens": 1000}
    with server(Parrot(delay=0.02), request_seconds=0.4) as running:
        assert running.post(ASKED)[0] == 200
        status, told = running.post(slow)
        assert status == 504 and told["error"]["message"] == "the request was not answered within 0.4 s"
        status, text = running.post({**slow, "stream": True})
        *parts, last = text.removesuffix("\n\n").split("\n\n")
        assert status == 200 and len(parts) > 1 and "within 0.4 s" in last and "error" in last
        wait_for(
            lambda: running.service.state()["requests"] == 0
        )  # what it held is free, after the engine's step
        assert running.post(ASKED)[0] == 200


def test_pages_of_allowed_origins_may_ask() -> None:
    page = "https://chat.example.com"
    with server(allowed_origins=(page,)) as running:
        status, headers = headers_of(running, Origin=page)
        assert status == 200 and headers["access-control-allow-origin"] == page
        assert "x-request-id" in headers["access-control-expose-headers"].lower()
        assert "access-control-allow-origin" not in headers_of(running, Origin="https://else.example")[1]
        asked = {"Origin": page, "Access-Control-Request-Method": "POST"}
        connection = running.connect()
        connection.request("OPTIONS", "/v1/chat/completions", headers=asked)
        assert connection.getresponse().status == 200
    with server() as running:
        assert "access-control-allow-origin" not in headers_of(running, Origin=page)[1]


def test_requests_have_ids_and_are_logged(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    with server(log=access_log(str(file)), keys={"search": "abc"}) as running:
        _, headers = headers_of(running, Authorization="Bearer abc", **{"X-Request-Id": "mine-7"})
        assert headers["x-request-id"] == "mine-7"
        _, headers = headers_of(running, **{"X-Request-Id": "two words"})
        assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
        running.call("GET", "/v2/%0Aforged?key=abc")
    lines = file.read_text().splitlines()
    patterns = (
        r'\S+ 127\.0\.0\.1 search "POST /v1/completions" 200 \d+\.\d{3} mine-7',
        rf'\S+ 127\.0\.0\.1 - "POST /v1/completions" 401 \S+ {headers["x-request-id"]}',
        r'\S+ 127\.0\.0\.1 - "GET /v2/%0Aforged" 404 \S+ \w+',
    )
    assert len(lines) == 3
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(patterns, lines, strict=True)), lines


def test_a_server_with_a_certificate(tmp_path: Path) -> None:
    file = tmp_path / "both.pem"
    file.write_text(CERTIFICATE)
    trusted, told = ssl.create_default_context(cafile=str(file)), []
    certificate = Certificate(str(file))

    def asked(port: int, path: str) -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=trusted, timeout=30)
        connection.request("GET", path)
        return connection.getresponse().status

    loading = LoadingAnswers("127.0.0.1", 0, certificate.context())
    port = loading._server.sockets[0].getsockname()[1]
    assert asked(port, "/ready") == 503 and asked(port, "/health") == 200
    with server(certificate=certificate, ready=told.append, sockets=loading.hand_over()) as running:
        assert told[0].startswith("https://127.0.0.1:")
        assert asked(running.port, "/ready") == 200
    loading.close()


def test_certificates_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.pem").write_text("")
    for given, problem in (
        (["--ssl-certfile", "nothing.pem"], "nothing.pem"),
        (["--ssl-certfile", str(tmp_path / "empty.pem")], "--ssl-certfile"),
        (["--ssl-keyfile", "key.pem"], "set --ssl-certfile too"),
    ):
        assert ds.main(["serve", str(tmp_path), *given]) == 2
        assert problem in capsys.readouterr().err


def parsed(file: Path, content: Any, *given: str) -> Any:
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return serve_options.parser().parse_args(["--config", str(file), *given])


def test_options_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    content = {
        "model": "./my-model",
        "max-model-len": 4096,
        "lora_modules": ["a=x", "b=y"],
        "enable-prefix-caching": False,
        "enable-auto-tool-choice": True,
        "speculative-config": {"method": "ngram", "num_speculative_tokens": 4},
    }
    args = parsed(file, content, "--port", "9000")
    assert (args.model, args.max_length, args.port) == ("./my-model", 4096, 9000)
    assert args.lora_modules == ["a=x", "b=y"] and args.enable_auto_tool_choice
    assert args.enable_prefix_caching is False and json.loads(args.speculative_config)["method"] == "ngram"
    args = parsed(file, content, "other", "--max-length", "128", "--lora-modules", "c=z")
    assert (args.model, args.max_length, args.lora_modules) == ("other", 128, ["c=z"])
    args = parsed(file, {"model": "m", "gpu-memory-utilization": 0.9}, "--kv-cache-memory-bytes", "1000")
    assert (args.kv_cache_memory_bytes, args.gpu_memory_utilization) == (1000, None)
    assert serve_options.parser().parse_args(["--conf", str(file)]).gpu_memory_utilization == 0.9
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    assert parsed(file, "model: m\nport: 7000  # ours\n").port == 7000


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            {"model": "m", "max-modle-len": 8},
            "'max-modle-len' is not an option, did you mean 'max-model-len'?",
        ),
        ({"model": "m", "port": "many"}, "argument --port: invalid int value: 'many'"),
        ({"port": 8}, "required: model"),
        ("[1]", "it contains no options"),
        ({"model": "m", "config": "other.yaml"}, "'config' is not an option"),
        ({"model": "m", "api-key": None}, "'api-key' is null: set a value"),
        ({"model": "m", "port": [1, 2]}, "'port' is [1, 2]: set a value, or leave it out"),
        ({"model": "m", "lora-modules": []}, "'lora-modules' is []"),
        ({"model": None}, "'model' is null"),
    ],
)
def test_files_of_options_that_are_refused(
    content: Any, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(tmp_path / "serve.json", content)
    assert problem in capsys.readouterr().err
