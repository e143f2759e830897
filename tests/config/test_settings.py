"""Settings from a file, the environment and flags; an error names its key and source."""

from __future__ import annotations

from pathlib import Path

import pytest

from slicewise.config.settings import KEYS, Settings
from slicewise.config.sources import assignments, read_settings
from slicewise.config.values import Address
from slicewise.core.errors import SlicewiseError
from slicewise.engine.reclaim import ReclaimRules
from slicewise.engine.reservation_rules import ReservationRules

DOCS = Path(__file__).parents[2] / "docs"


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "slicewise.toml"
    path.write_text(text)
    return path


def test_without_sources_all_settings_are_defaults() -> None:
    settings = read_settings({}, {})
    assert settings == Settings()
    assert str(settings.listen) == "127.0.0.1:8080"
    assert settings.address == "http://127.0.0.1:8080"
    assert settings.reservation_rules == ReservationRules(after=300, share=0.1)


def test_flags_override_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        'policy = "mfi"\nlisten = "[::1]:1"\n[queue]\nreserve_after = 1\nreserve_share = 0.1\n'
        '[limits]\nrequests_per_second = 5\n[tls]\ncert = "c"\nkey = "k"\n',
    )
    environment = {
        "SLICEWISE_QUEUE_RESERVE_AFTER": "2",
        "SLICEWISE_QUEUE_RESERVE_SHARE": "0.2",
        "HOME": "/",
    }
    flags = {"queue.reserve_after": 3, "data": tmp_path, "database": None}
    settings = read_settings(flags, environment, path)
    assert (settings.reserve_after, settings.reserve_share) == (3, 0.2)
    assert (settings.policy, settings.data) == ("mfi", tmp_path)
    assert settings.listen == Address("::1", 1)
    assert settings.requests_per_second == 5.0
    assert settings.address == "https://[::1]:1"


def test_every_key_can_be_set_in_the_environment() -> None:
    values = {
        "data": "d", "listen": "localhost:1", "listen_without_tls": "yes", "advertise": "http://x",
        "database": "postgresql://u:p@h/d", "tls.cert": "c", "tls.key": "k", "policy": "first-fit",
        "tls.client_ca": "a", "tls.client_required": "yes",
        "oidc.issuer": "https://login.example", "oidc.audience": "a,b", "oidc.ca": "ca.pem",
        "oidc.jwks": "https://login.example/keys", "oidc.algorithms": "ES256,EdDSA",
        "oidc.client": "sw", "oidc.scopes": "openid,groups", "oidc.refresh_seconds": "60",
        "sign_in.rules": "rules.toml",
        "geometry": "a.toml,b.toml", "queue.reserve_after": "1", "queue.reserve_share": "0.5",
        "queue.reclaim": "guarantee", "queue.reclaim_grace": "1", "queue.reclaim_min_run": "2",
        "queue.reclaim_notice": "3", "queue.preemptible_price": "50",
        "rehearsal.enabled": "no", "rehearsal.share": "0.2",
        "limits.requests_per_second": "1.5", "limits.body_bytes": "2_048",
        "limits.head_bytes": "2048", "limits.page": "10", "limits.streams": "1",
        "limits.streams_per_tenant": "1", "limits.requests_in_flight": "7",
        "limits.connections": "99",
        "limits.unread_bytes": "65536", "limits.unread_bytes_in_all": "65536",
        "limits.queued_per_tenant": "9", "limits.lines_per_tenant": "3", "limits.waiting": "5",
        "require_history": "yes", "journal.days": "30", "journal.archive": "a",
        "answers.hours": "1", "lease.seconds": "3", "leases.warning_seconds": "60",
        "clock.max_gap_hours": "2",
        "agents.lost_seconds": "30",
        "agents.after_reboot": "fail", "extender.enabled": "true", "extender.kubeconfig": "k",
        "extender.client_ca": "a", "extender.client_name": "s", "extender.tenants": "refuse",
        "extender.active_seconds": "5", "metrics.public": "true", "log.format": "json",
        "limits.agent_requests_per_second": "2", "limits.hellos_per_minute": "3",
        "limits.strangers_per_second": "4", "proxies.trusted": "10.0.0.0/8,::1",
        "proxies.header": "forwarded", "limits.models": "7", "limits.states": "2000",
        "log.level": "debug", "log.requests": "1",
    }  # fmt: skip
    assert set(values) == set(KEYS)
    settings = read_settings({}, {KEYS[key].variable: value for key, value in values.items()})
    assert settings.geometry == (Path("a.toml"), Path("b.toml"))
    assert settings.listen_without_tls
    assert settings.body_bytes == 2048
    assert settings.advertise == settings.address == "http://x"


@pytest.mark.parametrize(
    ("flags", "environment", "text", "problem"),
    [
        ({"listen": "8080"}, {}, "", "listen (flag): must be HOST:PORT"),
        ({"listen": "h:99999"}, {}, "", "listen (flag): must be HOST:PORT"),
        ({}, {"SLICEWISE_LISTEN": "x"}, "", "listen (SLICEWISE_LISTEN): must be HOST:PORT"),
        ({"advertise": "host:8080"}, {}, "", "advertise (flag): must be a URL, such as https"),
        ({"advertise": "http://[::1"}, {}, "", "advertise (flag): Invalid IPv6 URL"),
        ({}, {}, "listen = 7", "slicewise.toml): must be text in one line, not 7"),
        ({}, {}, "[queue]\nreserve_share = true", "must be a number from 0 to 1, not True"),
        ({}, {}, "[queue]\nreserve_share = 1.5", "must be a number from 0 to 1"),
        ({}, {"SLICEWISE_LEASE_SECONDS": "soon"}, "", "must be a number from 0.5 to 3600"),
        ({}, {"SLICEWISE_LEASE_SECONDS": "nan"}, "", "must be a number from 0.5 to 3600"),
        ({}, {}, "[lease]\nseconds = true", "must be a number"),
        ({}, {}, "[lease]\nseconds = []", "must be a number"),
        ({}, {}, "geometry = 5", "must be a list of paths"),
        ({}, {}, "[metrics]\npublic = 3", "metrics.public"),
        ({}, {}, 'policy = "mfy"', "unknown policy 'mfy'; did you mean mfi"),
        ({"log.format": "xml"}, {}, "", "must be text or json, not 'xml'"),
        ({}, {}, "queues = 1", "unknown setting"),
        ({}, {}, "[queue]\nreserve_afte = 1", "did you mean queue.reserve_after"),
        ({}, {"SLICEWISE_QUEUE_RESERVE_SHAR": "1"}, "", "SLICEWISE_QUEUE_RESERVE_SHARE?"),
        ({"nonsense": 1}, {}, "", "unknown setting (flag) 'nonsense'"),
        ({"tls.cert": "c"}, {}, "", "tls.key is missing"),
        ({"tls.key": "c"}, {}, "", "tls.cert is missing"),
        ({"listen": "0.0.0.0:1"}, {}, "", "listen_without_tls"),
        ({"tls.client_required": True}, {}, "", "tls.client_ca is missing"),
        ({"tls.client_ca": "a"}, {}, "", "tls.cert is missing"),
        (
            {"tls.client_ca": "a", "tls.cert": "c", "tls.key": "k"},
            {},
            "",
            "sign_in.rules is missing",
        ),
        (
            {
                "tls.client_ca": "a",
                "tls.cert": "c",
                "tls.key": "k",
                "sign_in.rules": "r",
                "extender.client_ca": "b",
            },
            {},
            "",
            "must be the same as tls.client_ca",
        ),
        ({"oidc.issuer": "http://login.example"}, {}, "", "must be an https URL"),
        ({"oidc.issuer": "https://u@login.example"}, {}, "", "must be a URL"),
        ({"oidc.issuer": "https://l.example"}, {}, "", "oidc.audience is missing"),
        ({"oidc.issuer": "https://l.example", "oidc.audience": "a"}, {}, "", "sign_in.rules is m"),
        ({"oidc.audience": "a"}, {}, "", "oidc.issuer is missing"),
        ({"oidc.algorithms": "none"}, {}, "", "must be some of RS256"),
        ({"oidc.algorithms": "ES256,HS256"}, {}, "", "must be some of RS256"),
        ({"listen": "example.org:1"}, {}, "", "listen_without_tls"),
        ({}, {}, "not toml", "not TOML"),
    ],
)
def test_an_error_names_key_source_range_and_value(
    tmp_path: Path,
    flags: dict[str, object],
    environment: dict[str, str],
    text: str,
    problem: str,
) -> None:
    with pytest.raises(SlicewiseError) as error:
        read_settings(flags, environment, file(tmp_path, text))
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", KEYS)
def test_every_key_refuses_a_value_of_the_wrong_type(name: str) -> None:
    with pytest.raises(SlicewiseError) as error:
        read_settings({name: {"a": 1}}, {})
    assert str(error.value).startswith(f"{name} (flag): must be ")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SlicewiseError, match="cannot be read"):
        read_settings({}, {}, tmp_path / "nowhere.toml")


def test_rules_of_reclaim() -> None:
    assert not Settings().reclaim_rules.enabled
    chosen = {
        "queue.reclaim": "guarantee",
        "queue.reclaim_grace": "0",
        "queue.reclaim_min_run": "60",
        "queue.reclaim_notice": "5.5",
    }
    assert read_settings(chosen, {}).reclaim_rules == ReclaimRules(True, 0, 60, 5.5)
    for key, value in (
        ("queue.reclaim", "always"),
        ("queue.reclaim_notice", "-1"),
        ("queue.preemptible_price", "0"),
        ("queue.preemptible_price", "101"),
    ):
        with pytest.raises(SlicewiseError, match=key):
            read_settings({key: value}, {})


def test_unrelated_variables_with_the_prefix_are_ignored() -> None:
    assert read_settings({}, {"SLICEWISE_SERVICE_HOST": "10.0.0.1"}) == Settings()


def test_a_password_does_not_appear_in_messages() -> None:
    with pytest.raises(SlicewiseError) as error:
        read_settings({"database": "postgresql://u:secret@h/d\n"}, {})
    assert "secret" not in str(error.value)
    assert "secret" not in repr(read_settings({"database": "postgresql://u:secret@h/d"}, {}))


def test_listening_beyond_loopback_needs_tls_or_consent() -> None:
    assert read_settings({"listen": "0.0.0.0:1", "listen_without_tls": True}, {}).listen.port == 1
    assert read_settings({"listen": "0.0.0.0:1", "tls.cert": "c", "tls.key": "k"}, {}).tls_cert


def test_assignments() -> None:
    assert assignments(["queue.reserve_after=3"]) == {"queue.reserve_after": "3"}
    with pytest.raises(SlicewiseError, match="KEY=VALUE"):
        assignments(["queue.reserve_after"])
    with pytest.raises(SlicewiseError, match="unknown setting"):
        assignments(["x=1"])


def documented(page: str) -> dict[str, str]:
    """The default of every key in the settings table of a document."""
    text = (DOCS / page).read_text(encoding="utf-8")
    section = text.split("\n## Settings\n")[1].split("\n## ")[0]
    found: dict[str, str] = {}
    for row in section.splitlines():
        if row.startswith("| `"):
            keys, defaults = (cell.strip().split(", ") for cell in row.split("|")[1:3])
            if len(defaults) < len(keys):
                defaults *= len(keys)
            found |= zip((key.strip("`") for key in keys), defaults, strict=True)
    return found


def written(value: object) -> str:
    """A default as the documents write it."""
    if value in (None, ()):
        return "-"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if type(value) is tuple:
        return f"`{','.join(value)}`"
    return f"`{value:.12g}`" if isinstance(value, int | float) else f"`{value}`"


def test_every_key_is_documented_with_its_default() -> None:
    defaults = Settings()
    real = {name: written(getattr(defaults, key.field)) for name, key in KEYS.items()}
    assert documented("operations.md") == real


def test_variables_of_clients_are_ignored() -> None:
    theirs = {"SLICEWISE_SERVER": "x", "SLICEWISE_TOKEN": "y", "SLICEWISE_TOKEN_FILE": "z"}
    assert read_settings({}, theirs).database is None
    with pytest.raises(SlicewiseError, match="did you mean SLICEWISE_LISTEN"):
        read_settings({}, {"SLICEWISE_LISTN": "127.0.0.1:1"})
