"""Configuration of agents: what each one gets, merged with what its user has, and gone again without a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ds4 import clients
from ds4.catalogue import FALLBACK_INSTRUCTIONS, catalogue_text
from ds4.errors import Ds4Error
from plugins.modules import ds4_client_config

MODELS = {
    "object": "list",
    "data": [
        {
            "id": "deepseek-v4-flash",
            "context_length": 262144,
            "top_provider": {"context_length": 262144, "max_completion_tokens": 262144},
        }
    ],
}
USER_TOML = 'model = "gpt-x"\n\n[tui]\ntheme = "dark"\n'
USER_JSON = '{\n  // mine\n  "theme": "dark",\n  "provider": {"mine": {}}\n}\n'


def endpoint(**change: Any) -> clients.Endpoint:
    return clients.endpoint("ds4", "ds4 on spark1", "http://10.0.0.5:8000/", **{"context": 262144, **change})


def configure(root: Path, target: clients.Endpoint | None, **options: Any) -> dict[str, Any]:
    return clients.configure(
        str(root), options.pop("layout", "home"), options.pop("provider", "ds4"), target, **options
    )


def tree(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


# ------------------------------------------------------------------------------------------------ what is served


def test_limits_come_from_the_model_list() -> None:
    assert clients.served(MODELS) == {
        "model": "deepseek-v4-flash",
        "context": 262144,
        "max_output": 196608,
        "catalogue": "",
    }
    with_catalogue = {**MODELS, **json.loads(catalogue_text(262144))}
    assert json.loads(clients.served(with_catalogue)["catalogue"]) == json.loads(catalogue_text(262144))


@pytest.mark.parametrize("answer", [{}, {"data": []}, {"data": [{"id": "gpt"}]}, [], None, "x"])
def test_another_server_is_recognised(answer: Any) -> None:
    with pytest.raises(Ds4Error, match="does not say how much context is served"):
        clients.served(answer)


@pytest.mark.parametrize(
    ("context", "most", "limit"),
    [
        (524288, 393216, 384000),
        (1048576, 393216, 384000),
        (262144, 262144, 196608),
        (262144, 1000, 1000),
        (4096, 4096, 3072),
    ],
)
def test_an_answer_leaves_room_for_its_prompt(context: int, most: int, limit: int) -> None:
    assert clients.output_limit(context, most) == limit
    assert limit < context


# ------------------------------------------------------------------------------------------------ what each client gets


def test_every_client_gets_the_served_context(tmp_path: Path) -> None:
    configure(tmp_path, endpoint())
    (codex,) = json.loads((tmp_path / ".codex/ds4-models.json").read_text())["models"]
    assert codex["context_window"] == codex["max_context_window"] == 262144
    assert codex["auto_compact_token_limit"] == 220000
    opencode = json.loads((tmp_path / ".config/opencode/opencode.json").read_text())
    assert opencode["provider"]["ds4"]["models"]["deepseek-v4-flash"]["limit"] == {"context": 262144, "output": 196608}
    pi = json.loads((tmp_path / ".pi/agent/models.json").read_text())
    (model,) = pi["providers"]["ds4"]["models"]
    assert (model["contextWindow"], model["maxTokens"]) == (262144, 196608)
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=262144\n" in (tmp_path / ".local/bin/claude-ds4").read_text()


def test_addresses_end_as_each_client_wants_them(tmp_path: Path) -> None:
    configure(tmp_path, endpoint())
    files = tree(tmp_path)
    assert 'base_url = "http://10.0.0.5:8000/v1"\nwire_api = "responses"\n' in files[".codex/config.toml"]
    assert "ANTHROPIC_BASE_URL=http://10.0.0.5:8000\n" in files[".local/bin/claude-ds4"]
    assert '"baseURL": "http://10.0.0.5:8000/v1"' in files[".config/opencode/opencode.json"]
    assert '"baseUrl": "http://10.0.0.5:8000/v1"' in files[".pi/agent/models.json"]


def test_the_defaults_of_the_user_are_left_alone_unless_asked(tmp_path: Path) -> None:
    configure(tmp_path, endpoint())
    files = tree(tmp_path)
    assert not files[".codex/config.toml"].startswith("model")
    assert files[".codex/ds4.config.toml"].splitlines()[1:] == [
        'model = "deepseek-v4-flash"',
        'model_provider = "ds4"',
        'model_catalog_json = "ds4-models.json"',
    ]
    assert "model" not in json.loads(files[".config/opencode/opencode.json"])
    assert ".pi/agent/settings.json" not in files

    configure(tmp_path, endpoint(), default=True)
    files = tree(tmp_path)
    assert files[".codex/config.toml"].splitlines()[1:4] == files[".codex/ds4.config.toml"].splitlines()[1:]
    assert json.loads(files[".config/opencode/opencode.json"])["model"] == "ds4/deepseek-v4-flash"
    assert json.loads(files[".pi/agent/settings.json"]) == {
        "defaultProvider": "ds4",
        "defaultModel": "deepseek-v4-flash",
    }

    configure(tmp_path, endpoint(), default=False)
    assert ".pi/agent/settings.json" not in tree(tmp_path)
    assert "model" not in json.loads(tree(tmp_path)[".config/opencode/opencode.json"])


def test_codex_can_ask_the_engine_at_every_start(tmp_path: Path) -> None:
    configure(tmp_path, endpoint(), clients=["codex"], served_catalogue=True)
    files = tree(tmp_path)
    assert ".codex/ds4-models.json" not in files
    assert "model_catalog_json" not in files[".codex/ds4.config.toml"]
    assert 'model_catalog_url = "http://10.0.0.5:8000/v1/models"' in files[".codex/config.toml"]
    assert 'experimental_bearer_token = "dsv4-local"' in files[".codex/config.toml"]


def test_a_served_catalogue_is_kept_with_the_true_context_and_the_wanted_instructions() -> None:
    stale = json.loads(catalogue_text(1000000, "old"))
    stale["models"][0]["priority"] = 7
    (entry,) = json.loads(endpoint(catalogue=json.dumps(stale)).catalogue)["models"]
    assert (entry["context_window"], entry["priority"], entry["base_instructions"]) == (262144, 7, "old")
    (entry,) = json.loads(endpoint(catalogue=json.dumps(stale), instructions="new").catalogue)["models"]
    assert entry["base_instructions"] == "new"
    for empty in ("", " ", None):
        stale["models"][0]["base_instructions"] = empty
        (entry,) = json.loads(endpoint(catalogue=json.dumps(stale)).catalogue)["models"]
        assert entry["base_instructions"] == FALLBACK_INSTRUCTIONS
    (entry,) = json.loads(endpoint(instructions=" ").catalogue)["models"]
    assert entry["base_instructions"] == FALLBACK_INSTRUCTIONS


def test_only_the_chosen_clients_are_written(tmp_path: Path) -> None:
    configure(tmp_path, endpoint(), clients=["claude"])
    assert set(tree(tmp_path)) == {".local/bin/claude-ds4", ".config/ds4-fleet/clients-ds4.json"}


def test_the_folder_for_the_controller_needs_no_home(tmp_path: Path) -> None:
    result = configure(tmp_path / "clients/spark1", endpoint(), layout="folder", default=True)
    assert set(tree(tmp_path / "clients/spark1")) == {
        "codex/config.toml",
        "codex/ds4.config.toml",
        "codex/ds4-models.json",
        "claude-ds4",
        "opencode/opencode.json",
        "pi/models.json",
        "pi/settings.json",
        ".clients-ds4.json",
    }
    assert len(result["files"]) == 7
    configure(tmp_path / "clients/spark2", endpoint(), layout="folder")
    configure(tmp_path / "clients/spark1", None, layout="folder")
    assert [path.name for path in (tmp_path / "clients").iterdir()] == ["spark2"]
    configure(tmp_path / "clients/spark2", None, layout="folder")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ the wrapper


def test_the_wrapper_gives_claude_its_environment_and_arguments(tmp_path: Path) -> None:
    label = "it's $(touch /tmp/x) `spark`"
    configure(tmp_path, clients.endpoint("ds4", label, "http://h:1", 8192), clients=["claude"])
    wrapper = tmp_path / ".local/bin/claude-ds4"
    assert os.access(wrapper, os.X_OK)
    fake = tmp_path / "bin/claude"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nenv\nprintf "arg:%s\\n" "$@"\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{fake.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "ANTHROPIC_API_KEY": "theirs"}
    ran = subprocess.run([wrapper, "-p", "a b"], env=environment, capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    assert f"ANTHROPIC_CUSTOM_MODEL_OPTION_NAME={label}" in lines
    assert "ANTHROPIC_BASE_URL=http://h:1" in lines
    assert not [line for line in lines if line.startswith("ANTHROPIC_API_KEY")]
    assert lines[-2:] == ["arg:-p", "arg:a b"]
    missing = subprocess.run(
        [wrapper], env={**environment, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert (missing.returncode, missing.stderr[:24]) == (127, "claude is not installed:")


@pytest.mark.parametrize(
    ("provider", "label", "url"),
    [
        ("a b", "x", "http://h"),
        ("", "x", "http://h"),
        ("a", "x\ny", "http://h"),
        ("a", "x", "http://h\n"),
        ("../a", "x", "u"),
    ],
)
def test_what_cannot_be_written_in_every_client_is_refused(provider: str, label: str, url: str) -> None:
    with pytest.raises(Ds4Error):
        clients.endpoint(provider, label, url, 4096)


# ------------------------------------------------------------------------------------------------ merging and removing


def theirs(root: Path) -> dict[str, str]:
    files = {
        ".codex/config.toml": USER_TOML,
        ".config/opencode/opencode.json": USER_JSON,
        ".pi/agent/models.json": '{"providers": {"mine": {"a": 1}}}',
        ".pi/agent/settings.json": '{\n    "defaultProvider": "mine",\n    "x": [1]\n}',
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / ".codex/config.toml").chmod(0o600)
    return files


def test_what_the_user_has_stays_and_comes_back(tmp_path: Path) -> None:
    files = theirs(tmp_path)
    first = configure(tmp_path, endpoint(), default=True)
    assert first["changed"]
    assert len(first["backups"]) == 4
    assert {Path(path).read_text() for path in first["backups"]} == set(files.values())
    now = tree(tmp_path)
    assert "// mine" in now[".config/opencode/opencode.json"]
    assert '"mine": {}' in now[".config/opencode/opencode.json"]
    assert json.loads(now[".pi/agent/settings.json"]) == {
        "defaultProvider": "ds4",
        "defaultModel": "deepseek-v4-flash",
        "x": [1],
    }
    assert '# ds4-fleet ds4 put aside: model = "gpt-x"' in now[".codex/config.toml"]
    assert (tmp_path / ".codex/config.toml").stat().st_mode & 0o777 == 0o600

    again = configure(tmp_path, endpoint(), default=True)
    assert (again["changed"], again["backups"], again["diff"]) == (False, [], [])

    configure(tmp_path, None, backup=False)
    left = {name: text for name, text in tree(tmp_path).items() if ".before-ds4-" not in name}
    assert left == files


def test_a_new_context_changes_numbers_and_nothing_else(tmp_path: Path) -> None:
    files = theirs(tmp_path)
    configure(tmp_path, endpoint(), default=True)
    result = configure(tmp_path, endpoint(context=524288), default=True, backup=False)
    assert {Path(item["after_header"]).name for item in result["diff"]} == {
        "ds4-models.json",
        "claude-ds4",
        "opencode.json",
        "models.json",
        "clients-ds4.json",
    }
    configure(tmp_path, None, backup=False)
    assert {name: text for name, text in tree(tmp_path).items() if ".before-ds4-" not in name} == files


def test_without_anything_of_the_user_s_nothing_is_left(tmp_path: Path) -> None:
    result = configure(tmp_path, endpoint(), default=True)
    assert result["backups"] == []
    configure(tmp_path, None)
    assert list(tmp_path.iterdir()) == []
    assert configure(tmp_path, None)["changed"] is False


def test_a_provider_that_the_user_wrote_by_hand_comes_back(tmp_path: Path) -> None:
    by_hand = '{"provider": {"ds4": {"name": "by hand"}}, "$schema": "theirs"}'
    path = tmp_path / ".config/opencode/opencode.json"
    path.parent.mkdir(parents=True)
    path.write_text(by_hand)
    configure(tmp_path, endpoint(), clients=["opencode"])
    assert json.loads(path.read_text())["provider"]["ds4"]["name"] == "ds4 on spark1"
    assert json.loads(path.read_text())["$schema"] == "theirs"
    configure(tmp_path, None)
    assert json.loads(path.read_text()) == json.loads(by_hand)


def test_two_sparks_live_side_by_side(tmp_path: Path) -> None:
    files = theirs(tmp_path)
    other = clients.endpoint("spark2", "ds4 on spark2", "http://10.0.0.6:8000", 65536)
    configure(tmp_path, endpoint())
    configure(tmp_path, other, provider="spark2")
    assert set(json.loads((tmp_path / ".pi/agent/models.json").read_text())["providers"]) == {"mine", "ds4", "spark2"}
    configure(tmp_path, None, provider="ds4")
    assert set(json.loads((tmp_path / ".pi/agent/models.json").read_text())["providers"]) == {"mine", "spark2"}
    configure(tmp_path, None, provider="spark2", backup=False)
    assert {name: text for name, text in tree(tmp_path).items() if ".before-ds4-" not in name} == files


def test_check_mode_writes_nothing_and_says_the_same(tmp_path: Path) -> None:
    files = theirs(tmp_path)
    predicted = configure(tmp_path, endpoint(), default=True, check=True)
    assert tree(tmp_path) == files
    assert predicted["changed"]
    done = configure(tmp_path, endpoint(), default=True)
    assert predicted["diff"] == done["diff"]
    assert predicted["files"] == done["files"]


def test_a_linked_dotfile_stays_a_link(tmp_path: Path) -> None:
    home, dotfiles = tmp_path / "home", tmp_path / "dotfiles"
    dotfiles.mkdir()
    (dotfiles / "config.toml").write_text(USER_TOML)
    (home / ".codex").mkdir(parents=True)
    (home / ".codex/config.toml").symlink_to(dotfiles / "config.toml")
    configure(home, endpoint(), clients=["codex"])
    assert (home / ".codex/config.toml").is_symlink()
    assert "[model_providers.ds4]" in (dotfiles / "config.toml").read_text()
    configure(home, None, backup=False)
    assert (dotfiles / "config.toml").read_text() == USER_TOML


def test_what_codex_adds_to_its_file_stays_when_we_come_again_and_when_we_go(tmp_path: Path) -> None:
    theirs(tmp_path)
    path = tmp_path / ".codex/config.toml"
    added = '\n[mcp_servers.mine]\ncommand = "echo"\n'
    end = "# <<< ds4-fleet ds4\n"
    configure(tmp_path, endpoint(), default=True)
    text = path.read_text()
    assert text.endswith(end)
    path.write_text(text[: -len(end)] + added + end)  # where its writer puts a new table
    configure(tmp_path, endpoint(context=65536), default=True)
    assert added in path.read_text()
    configure(tmp_path, None)
    assert path.read_text() == USER_TOML + added


def test_what_is_added_to_our_provider_stays_while_the_provider_does(tmp_path: Path) -> None:
    configure(tmp_path, endpoint(), clients=["codex"])
    path = tmp_path / ".codex/config.toml"
    touched = path.read_text().replace("# <<<", "request_max_retries = 5\n# <<<")
    path.write_text(touched)
    assert configure(tmp_path, endpoint(), clients=["codex"])["changed"] is False
    gone = configure(tmp_path, None)
    assert [Path(copy).read_text() for copy in gone["backups"]] == [touched]


SECRET = "sk-very-secret"


def with_secrets(root: Path) -> None:
    files = {
        ".codex/config.toml": f'''model = "{SECRET}"\n[model_providers.ds4]\nenv = {{key = "{SECRET}"}}\n[mcp.env]\nPAT = "{SECRET}"\n''',
        ".config/opencode/opencode.json": json.dumps(
            {"provider": {"ds4": {"options": {"apiKey": SECRET}}, "mine": {"options": {"apiKey": SECRET}}}}
        ),
        ".pi/agent/models.json": json.dumps({"providers": {"mine": {"apiKey": SECRET}}}, indent=1),
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        (root / name).chmod(0o600)


def test_a_secret_of_the_user_s_is_in_no_diff_and_in_no_readable_file(tmp_path: Path) -> None:
    with_secrets(tmp_path)
    for target in (endpoint(), endpoint(context=4096), None):
        result = configure(tmp_path, target, default=True)
        assert SECRET not in json.dumps(result)
        for path in tmp_path.rglob("*"):
            if path.is_file() and SECRET in path.read_text():
                assert path.stat().st_mode & 0o077 == 0, path


def test_the_diff_shows_our_values_and_the_names_of_what_they_replace(tmp_path: Path) -> None:
    with_secrets(tmp_path)
    shown = {Path(item["after_header"]).name: item for item in configure(tmp_path, endpoint(), default=True)["diff"]}
    assert '# ds4-fleet ds4 put aside: model = "…"\n' in shown["config.toml"]["after"]
    assert 'base_url = "http://10.0.0.5:8000/v1"\n' in shown["config.toml"]["after"]
    assert "PAT" not in shown["config.toml"]["after"]
    assert '"apiKey": "…"' in shown["opencode.json"]["before"]
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=262144" in shown["claude-ds4"]["after"]


def test_permissions_that_were_lost_come_back(tmp_path: Path) -> None:
    configure(tmp_path, endpoint())
    for name, mode in ((".local/bin/claude-ds4", 0o755), (".config/ds4-fleet/clients-ds4.json", 0o600)):
        path = tmp_path / name
        path.chmod(0o644)
        result = configure(tmp_path, endpoint())
        assert [item["after_header"] for item in result["diff"]] == [f"{path} (mode {mode:04o})"]
        assert path.stat().st_mode & 0o777 == mode
        assert configure(tmp_path, endpoint())["changed"] is False


def test_a_lost_record_does_not_make_ours_the_user_s(tmp_path: Path) -> None:
    configure(tmp_path, endpoint(), clients=["opencode", "pi"], default=True)
    (tmp_path / ".config/ds4-fleet/clients-ds4.json").unlink()
    configure(tmp_path, endpoint(context=4096), clients=["opencode", "pi"], default=True)
    configure(tmp_path, None)
    left = "\n".join(text for name, text in tree(tmp_path).items() if ".before-ds4-" not in name)
    assert "ds4" not in left


def test_line_ends_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / ".codex/config.toml"
    path.parent.mkdir()
    path.write_bytes(b'model = "x"\r\n')
    configure(tmp_path, endpoint(), clients=["codex"], default=True)
    configure(tmp_path, None)
    assert path.read_bytes() == b'model = "x"\r\n'


def test_a_file_in_another_encoding_is_refused_and_left(tmp_path: Path) -> None:
    path = tmp_path / ".codex/config.toml"
    path.parent.mkdir()
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(Ds4Error, match=r"config.toml cannot be read.*Required: UTF-8"):
        configure(tmp_path, endpoint())
    assert path.read_bytes() == b"# caf\xe9\n"


def test_the_module_gives_a_diff_only_when_it_is_asked_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for asked in (False, True):
        arguments = {
            "root": str(tmp_path / str(asked)),
            "url": "http://h:8000",
            "context": 4096,
            "_ansible_diff": asked,
            "_ansible_remote_tmp": str(tmp_path),
        }
        with patch_module_args(arguments), pytest.raises(SystemExit):
            ds4_client_config.main()
        assert ("diff" in json.loads(capsys.readouterr().out)) is asked


@pytest.mark.parametrize("name", [".local/bin/claude-ds4", ".codex/ds4.config.toml", ".codex/ds4-models.json"])
def test_a_file_of_the_same_name_that_is_not_ours_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text("theirs")
    with pytest.raises(Ds4Error, match="exists and is not ours"):
        configure(tmp_path, endpoint())
    assert tree(tmp_path) == {name: "theirs"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".codex/config.toml", 'a = "x'),
        (".config/opencode/opencode.json", "{"),
        (".pi/agent/models.json", '{"providers": []}'),
    ],
)
def test_a_broken_file_stops_before_anything_is_written(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(Ds4Error):
        configure(tmp_path, endpoint())
    assert tree(tmp_path) == {name: text}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib reads TOML from Python 3.11 on")
def test_codex_files_are_toml(tmp_path: Path) -> None:
    import tomllib

    theirs(tmp_path)
    configure(tmp_path, endpoint(), default=True)
    read = tomllib.loads((tmp_path / ".codex/config.toml").read_text())
    assert read["model_provider"] == "ds4"
    assert read["tui"] == {"theme": "dark"}
    assert read["model_providers"]["ds4"]["stream_idle_timeout_ms"] == 1000000
    assert tomllib.loads((tmp_path / ".codex/ds4.config.toml").read_text())["model_catalog_json"] == "ds4-models.json"
