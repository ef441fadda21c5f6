"""The embedded assets: whole or absent, checked, fetched once, through the user's own index."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from interp import assets
from interp.errors import InterpError

CONTENT = b"tiny asset \x00\xff" * 1000
ROOT = Path(__file__).resolve().parents[1]


def tiny(path: str = "tinypkg/data/tiny.bin", content: bytes = CONTENT) -> assets.Asset:
    return assets.Asset(
        name="tiny",
        description="a test asset",
        package="tinypkg",
        version="0.1.0",
        path=path,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        licence="CC0",
    )


class Index:
    """Stands in for the installer: unpacks `content` and counts how often it was asked."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.calls = 0

    def __call__(self, asset: assets.Asset, folder: Path) -> None:
        self.calls += 1
        path = folder / "wheel" / asset.path
        path.parent.mkdir(parents=True)
        path.write_bytes(self.content)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "a cache"
    monkeypatch.setenv("INTERP_CACHE", str(folder))
    monkeypatch.setattr(assets, "ASSETS", {"tiny": tiny()})
    return folder


@pytest.fixture
def index(monkeypatch) -> Index:
    index = Index()
    monkeypatch.setattr(assets, "_install", index)
    return index


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "x"))
    assert assets.cache_dir() == tmp_path / "x"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INTERP_CACHE", "relative")
    assert assets.cache_dir() == tmp_path / "relative"
    monkeypatch.setenv("INTERP_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert "interp" in assets.cache_dir().parts
    assert not assets.cache_dir().exists()


def test_fetched_once_then_offline(cache, index):
    said: list[str] = []
    path = assets.fetch("tiny", notify=said.append)
    assert path == cache / "assets" / "tiny.bin"
    assert path.read_bytes() == CONTENT
    assert files(cache) == ["assets", "assets/tiny.bin"]  # nothing else is left behind
    assert len(said) == 1 and "tinypkg 0.1.0" in said[0] and "CC0" in said[0]
    assert assets.fetch("tiny", offline=True) == assets.fetch("tiny", notify=said.append) == path
    assert index.calls == 1 and len(said) == 1


def test_says_so_on_stderr_by_default(cache, index, capsys):
    assets.fetch("tiny")
    captured = capsys.readouterr()
    assert captured.out == "" and "fetching tiny" in captured.err


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"", CONTENT[:-1] + b"!"])
def test_a_damaged_file_is_replaced_with_a_notice(cache, index, damage):
    path = assets.fetch("tiny", notify=lambda line: None)
    path.write_bytes(damage)
    assert assets.status()[0]["state"] == "corrupt"
    with pytest.raises(InterpError, match=r"tiny is corrupt .*interp assets fetch"):
        assets.fetch("tiny", offline=True)
    said: list[str] = []
    assert assets.fetch("tiny", notify=said.append).read_bytes() == CONTENT
    assert "damaged" in said[0] and index.calls == 2


def test_offline_and_absent_names_the_command(cache, index):
    with pytest.raises(InterpError, match=r"tiny is absent .*`interp assets fetch`"):
        assets.fetch("tiny", offline=True)
    assert index.calls == 0 and not cache.exists()


def test_unknown_name(cache):
    with pytest.raises(InterpError, match=r"no asset named 'tinny': there are tiny.*mean tiny\?"):
        assets.fetch("tinny")


def test_another_file_from_the_index_is_not_used(cache, index):
    index.content = CONTENT[:-1] + b"?"
    with pytest.raises(InterpError, match="served another"):
        assets.fetch("tiny", notify=lambda line: None)
    assert files(cache) == ["assets"]


def test_a_wheel_without_the_file(cache, monkeypatch):
    monkeypatch.setattr(assets, "_install", lambda asset, folder: (folder / "wheel").mkdir())
    with pytest.raises(InterpError, match=r"holds no tinypkg/data/tiny\.bin"):
        assets.fetch("tiny", notify=lambda line: None)
    assert files(cache) == ["assets"]


@pytest.mark.parametrize("how", ["dots", "link", "linked folder"])
def test_a_path_that_leads_out_is_refused(cache, monkeypatch, tmp_path, how):
    secret = tmp_path / "outside" / "tiny.bin"
    secret.parent.mkdir()
    secret.write_bytes(CONTENT)  # the right content: only the place is wrong
    path = "../../../../outside/tiny.bin" if how == "dots" else "tinypkg/tiny.bin"
    monkeypatch.setattr(assets, "ASSETS", {"tiny": tiny(path)})

    def install(asset: assets.Asset, folder: Path) -> None:
        package = folder / "wheel" / "tinypkg"
        if how == "linked folder":
            package.parent.mkdir()
            package.symlink_to(secret.parent)
        else:
            package.mkdir(parents=True)
            (package / "tiny.bin").symlink_to(secret)

    monkeypatch.setattr(assets, "_install", install)
    with pytest.raises(InterpError, match="leads out of the package"):
        assets.fetch("tiny", notify=lambda line: None)
    assert secret.read_bytes() == CONTENT
    assert files(cache) == ["assets"]


def test_fetches_at_once_leave_one_whole_file(cache, monkeypatch):
    barrier = threading.Barrier(4)
    index = Index()

    def install(asset: assets.Asset, folder: Path) -> None:
        barrier.wait(timeout=10)  # all four found the file absent
        index(asset, folder)

    monkeypatch.setattr(assets, "_install", install)
    results: list[object] = []

    def fetch() -> None:
        try:
            results.append(assets.fetch("tiny", notify=lambda line: None).read_bytes())
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [CONTENT] * 4
    assert files(cache) == ["assets", "assets/tiny.bin"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_a_killed_fetch_leaves_nothing_that_counts(cache, index):
    script = f"""
import os, signal
from interp import assets
assets.ASSETS = {{"tiny": assets.Asset(**{tiny().__dict__!r})}}
def install(asset, folder):
    path = folder / "wheel" / asset.path
    path.parent.mkdir(parents=True)
    path.write_bytes({CONTENT[:100]!r})
    os.kill(os.getpid(), signal.SIGKILL)
assets._install = install
assets.fetch("tiny")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert assets.status()[0]["state"] == "absent"
    (left,) = (cache / "assets").glob(".fetch-*")
    assert assets.fetch("tiny", notify=lambda line: None).read_bytes() == CONTENT
    assert left.exists()  # it could be another process at work ...
    old = time.time() - 100_000
    os.utime(left, (old, old))
    assets._sweep(left.parent)
    assert not left.exists()  # ... until it is a day old


def test_a_cache_that_cannot_be_written(cache, index, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "file"))
    with pytest.raises(InterpError, match=r"cannot write .* INTERP_CACHE"):
        assets.fetch("tiny", notify=lambda line: None)


def make_wheel(folder: Path) -> None:
    folder.mkdir(parents=True)
    info = "tinypkg-0.1.0.dist-info"
    with zipfile.ZipFile(folder / "tinypkg-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tinypkg/__init__.py", "raise RuntimeError('never run')")
        wheel.writestr("tinypkg/data/tiny.bin", CONTENT)
        meta = (
            "Metadata-Version: 2.1\nName: tinypkg\nVersion: 0.1.0\nRequires-Dist: absent-package\n"
        )
        wheel.writestr(f"{info}/METADATA", meta)
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        names = ["tinypkg/__init__.py", "tinypkg/data/tiny.bin", f"{info}/METADATA"]
        names += [f"{info}/WHEEL", f"{info}/RECORD"]
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))


@pytest.fixture
def local_index(tmp_path, monkeypatch) -> Path:
    """The real pip, its index set by the user's environment to a local folder."""
    pytest.importorskip("pip")
    folder = tmp_path / "wheels"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def test_the_real_pip_and_the_users_index(cache, local_index, monkeypatch):
    make_wheel(local_index)
    monkeypatch.setenv("PIP_USER", "1")  # as some systems set it: it contradicts --target
    path = assets.fetch("tiny", notify=lambda line: None)
    assert path.read_bytes() == CONTENT
    assert files(cache) == ["assets", "assets/tiny.bin"]


def test_an_index_without_the_package_is_one_clear_error(cache, local_index, monkeypatch):
    local_index.mkdir()
    monkeypatch.setattr(assets.shutil, "which", lambda name: None)
    with pytest.raises(InterpError) as caught:
        assets.fetch("tiny", notify=lambda line: None)
    message = str(caught.value)
    assert "could not fetch tinypkg 0.1.0" in message and "ERROR: No matching" in message
    assert "\n" not in message and len(message) < 500
    assert files(cache) == ["assets"]


def fake_uv(folder: Path, exit_status: int) -> str:
    script = folder / "uv"
    script.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\n"
        "target = pathlib.Path(sys.argv[sys.argv.index('--target') + 1])\n"
        "assert sys.argv[1:3] == ['pip', 'install'] and sys.argv[-1] == 'tinypkg==0.1.0'\n"
        f"if {exit_status}: sys.exit('error: no route to index')\n"
        "(target / 'tinypkg' / 'data').mkdir(parents=True)\n"
        f"(target / 'tinypkg' / 'data' / 'tiny.bin').write_bytes({CONTENT!r})\n"
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for uv is a script with a shebang")
def test_uv_where_there_is_no_pip(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None)
    uv = fake_uv(tmp_path, 0)
    monkeypatch.setattr(assets.shutil, "which", lambda name: uv)
    assert assets.fetch("tiny", notify=lambda line: None).read_bytes() == CONTENT


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for uv is a script with a shebang")
def test_uv_that_fails(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None)
    uv = fake_uv(tmp_path, 2)
    monkeypatch.setattr(assets.shutil, "which", lambda name: uv)
    with pytest.raises(InterpError, match="error: no route to index"):
        assets.fetch("tiny", notify=lambda line: None)


def test_neither_pip_nor_uv(cache, monkeypatch):
    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(assets.shutil, "which", lambda name: None)
    with pytest.raises(InterpError, match="neither pip nor uv"):
        assets.fetch("tiny", notify=lambda line: None)


def test_no_host_is_named_and_nothing_is_built():
    command = assets._installers(assets.ASSETS["news"], Path("/t"))[0]
    assert {"--no-deps", "--only-binary", "--target"} <= set(command)
    assert not any("://" in part or "index" in part for part in command)


def test_status_and_table():
    assert set(assets.ASSETS) == {"smollm2-135m", "news"}
    for row in assets.status():
        assert row["state"] in {"present", "absent", "corrupt"}
        assert len(row["sha256"]) == 64 and row["bytes"] > 1e6 and row["licence"]


def test_news_are_the_article_bodies(tmp_path, monkeypatch):
    path = tmp_path / "n.zip"
    table = 'article_id,title,text\n1,"A, title","Body ""one""\nsecond line"\n2,T,\n3,U,Body two\n'
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("NewsArticles.csv", table)
    monkeypatch.setattr(assets, "fetch", lambda name, offline, notify: path)
    assert assets.news_documents() == ['Body "one"\nsecond line', "", "Body two"]


def test_the_real_news():
    if assets.status()[1]["state"] != "present":
        pytest.skip(
            f"the news are not in {assets.cache_dir()}: `interp assets fetch` puts them there"
        )
    documents = assets.news_documents(offline=True)
    assert len(documents) == 3824
    assert documents[0].startswith("Michigan billionaire education activist Betsy DeVos")
    assert sum(not text.strip() for text in documents) == 36


def test_import_needs_no_torch():
    code = "import sys, interp.assets, interp.sources; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
