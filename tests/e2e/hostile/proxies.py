"""Real proxies in front of the service: nginx and HAProxy, configured as documented."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import time
from pathlib import Path

import pytest
from scripts.test_services import MissingServiceError, require_program
from tests.e2e.hostile.raw import Raw
from tests.e2e.server import PATIENCE_SECONDS, Address, free_port

MANUAL = Path(__file__).parents[3] / "docs" / "operations.md"

_NGINX = """\
daemon off;
worker_processes 1;  # one, so that all clients share its connections
{user}
pid {folder}/pid;
error_log stderr warn;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/slicewise.conf;
}}
"""


def documented(language: str) -> str:
    """Return the documented configuration of a proxy."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", MANUAL.read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"{MANUAL.name} has {len(found)} blocks of {language}"
    return str(found[0])


def edited(text: str, *changes: tuple[str, str]) -> str:
    """Return the text with these replacements, each of which must match exactly once."""
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in:\n{text}"
        text = text.replace(old, new)
    return text


class Proxy:
    """A proxy on a loopback port, in front of a service."""

    def __init__(self, kind: str, configuration: str, folder: Path, service: Address) -> None:
        self.address: Address = ("127.0.0.1", free_port())
        self._log = folder / "log"
        program, openssl = _program(kind), _program("openssl")
        pem, key = folder / "slicewise.pem", folder / "slicewise.key"
        command = [str(openssl), "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]
        command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=slicewise.example"]
        subprocess.run(
            [*command, "-keyout", str(key), "-out", str(pem)], check=True, capture_output=True
        )
        self.context = ssl.create_default_context(cafile=str(pem))
        self.context.check_hostname = False
        here, there = "{}:{}".format(*self.address), "{}:{}".format(*service)
        if kind == "nginx":
            configuration = edited(
                configuration,
                ("listen 443 ssl", f"listen {here} ssl"),
                ("127.0.0.1:8080", there),
                ("/etc/nginx/slicewise.pem", str(pem)),
                ("/etc/nginx/slicewise.key", str(key)),
            )
            (folder / "slicewise.conf").write_text(configuration)
            # Its unprivileged workers could not read a folder of root.
            user = "user root;" if os.geteuid() == 0 else ""
            (folder / "conf").write_text(_NGINX.format(folder=folder, user=user))
            arguments = ["-p", str(folder), "-c", str(folder / "conf"), "-e", "stderr"]
        else:
            pem.write_text(pem.read_text() + key.read_text())
            configuration = edited(
                configuration,
                ("bind :443 ssl", f"bind {here} ssl"),
                ("127.0.0.1:8080", there),
                ("/etc/haproxy/slicewise.pem", str(pem)),
            )
            (folder / "conf").write_text(configuration)
            arguments = ["-db", "-f", str(folder / "conf")]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(program), *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def connect(self) -> Raw:
        """Open a client connection."""
        return Raw(self.address, self.context)

    def wait_until_ready(self) -> None:
        """Wait until the service answers through the proxy."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < give_up:
            if self._process.poll() is not None:
                break
            try:
                with self.connect() as raw:
                    raw.send(b"GET /readyz HTTP/1.1\r\nHost: slicewise.example\r\n\r\n")
                    answer = raw.answer()
                if answer is not None and answer.status == 200:
                    return
            except (TimeoutError, ConnectionError, ssl.SSLError):
                pass
            time.sleep(0.02)
        raise AssertionError(f"the proxy does not get ready:\n{self._log.read_text()}")

    def stop(self) -> None:
        """Stop the proxy and its child processes."""
        self._process.terminate()
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _program(name: str) -> Path:
    try:
        return require_program(name)
    except MissingServiceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
