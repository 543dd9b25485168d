#!/usr/bin/env python3
"""Set up a virtual environment and run one thing in it. Standard library only.

    python3 dev.py demo      run `autoremat demo` and show it
    python3 dev.py test      run the tests
    python3 dev.py lint      ruff, linter and formatter
    python3 dev.py types     pyright, on the oldest supported Python and JAX unless told otherwise
    python3 dev.py format    let ruff rewrite the files

The environment is `.venv-<python>-<jax>` beside this file. It is made at the first call and used again until
`pyproject.toml` changes; `--fresh` makes it anew. Arguments that are not listed below go to the program that
runs: `python3 dev.py test -k layers -x`.
"""

# This file must at least start on an old Python, to find a supported one: no syntax later than 3.7.
from __future__ import annotations

import argparse
import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.abspath(__file__))
SUPPORTED = ("3.13", "3.12", "3.11")  # in order of preference; a test compares this with pyproject.toml
OLDEST = ("3.11", "0.10.2")  # the lower end: Python, JAX
RUNNING = f"{sys.version_info[0]}.{sys.version_info[1]}"
TAIL, WIDTH = 20, 300  # of pip's output when it fails: the last lines, cut (pip lists every version there is)

# Of each mode: the extra of pyproject.toml that it needs, and the programs of the environment that it runs.
# Arguments of the caller go to the last one.
MODES = {
    "demo": ("demo", ["autoremat demo"]),
    "test": ("test", ["python -m pytest -n 2"]),
    "lint": ("dev", ["ruff check .", "ruff format --check ."]),
    "types": ("dev", ["pyright"]),
    "format": ("dev", ["ruff check --fix .", "ruff format ."]),
}


class SetupError(Exception):
    """Something that the user has to put right; the text says what."""


def say(text):
    print("dev.py: " + text, flush=True)


# Interpreters


def probe(executable):
    """`(version, None)` of an interpreter that can make environments, or `(None, why it cannot)`.

    A file by the name of python3.12 proves nothing: it may be a launcher for a version that is not
    installed, or lack the module that installs pip.
    """
    code = "import sys; print('%d.%d' % sys.version_info[:2]); import venv, ensurepip"
    try:
        done = subprocess.run(
            [executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError as error:
        return None, str(error)
    version = done.stdout.strip()
    if not version:
        return None, "does not start a Python"
    if done.returncode:
        return None, f"cannot make environments: no venv or ensurepip (on Debian: python{version}-venv)"
    return version, None


def candidates(version):
    """Where an interpreter of `version` may lie: this one, those on PATH, those of pyenv."""
    if version == RUNNING:
        yield sys.executable
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        found = shutil.which("python" + version, path=folder) if folder else None
        if found:
            yield found
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser(os.path.join("~", ".pyenv"))
    installed = os.path.join(pyenv, "versions", version + ".*", "bin", "python")
    yield from sorted(glob.glob(installed), reverse=True)


def find_python(versions):
    """The first interpreter of the first of `versions` that is installed, and its version."""
    passed_over = []
    for i, version in enumerate(versions):
        for executable in dict.fromkeys(candidates(version)):
            found, why = probe(executable)
            if found == version:
                if i > 0:
                    say(f"no usable Python {' or '.join(versions[:i])}, so Python {version}")
                return executable, version
            passed_over.append(f"{executable}: {why or 'is Python ' + str(found)}")
    text = f"Python {' or '.join(versions)} is missing: neither on PATH nor in pyenv's versions folder."
    raise SetupError("\n  ".join([text, *passed_over]))


def wanted_versions(option):
    """The Python versions to look for, in order. Without `--python`: the running one, if supported."""
    supported = ", ".join(SUPPORTED)
    if option:
        for version in option.split(","):
            if version not in SUPPORTED:
                raise SetupError(f"--python {version}: autoremat supports Python {supported}.")
        return option.split(",")
    if RUNNING in SUPPORTED:
        return [RUNNING, *(v for v in SUPPORTED if v != RUNNING)]
    say(f"this is Python {RUNNING}, autoremat supports {supported}: looking for one of them")
    return list(SUPPORTED)


# Environments


def program(folder, name):
    """The path of a program of an environment."""
    if os.name == "nt":
        return os.path.join(folder, "Scripts", name + ".exe")
    return os.path.join(folder, "bin", name)


def read_stamp(path, key):
    """The extras that were installed for exactly this `key`; none if it was another one."""
    try:
        with open(path, encoding="utf-8") as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return set()
    return set(stamp["extras"]) if stamp.get("key") == key else set()


def install(python, arguments, log_path):
    """`pip install`, its output in a log. A terminal shows what is at work, a failure the last lines."""
    options = ["--disable-pip-version-check", "--progress-bar=off"]
    command = [python, "-m", "pip", "install", *options, *arguments]
    started = time.monotonic()
    live = sys.stdout.isatty()
    lines = []
    pip = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with open(log_path, "w", encoding="utf-8") as log, pip:
        for line in pip.stdout or ():
            log.write(line)
            lines.append(line.rstrip())
            if live and line.startswith(("Collecting ", "Installing ", "Building ", "Preparing ")):
                print("\r\033[K  " + " ".join(line.split()[:2])[:70], end="", flush=True)
    if live:
        print("\r\033[K", end="")
    if pip.returncode:
        print("\n".join(line[:WIDTH] for line in lines[-TAIL:]))
        raise SetupError(f"pip failed; all of its output is in {os.path.relpath(log_path, ROOT)}")
    say(f"installed in {time.monotonic() - started:.0f} s")


def environment(executable, version, jax, extra, fresh):
    """The folder of an environment that holds autoremat, its `extra` and this JAX."""
    name = f".venv-{version}-{'jax' + jax if jax else 'newest'}"
    folder = os.path.join(ROOT, name)
    python = program(folder, "python")
    stamp_path = os.path.join(folder, "autoremat-dev.json")
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        key = hashlib.sha256(file.read()).hexdigest()
    if fresh and os.path.isdir(folder):
        shutil.rmtree(folder)
    present = read_stamp(stamp_path, key) if os.path.exists(python) else set()
    if {extra, "dev"} & present:
        say(f"using {name}")
        return folder
    if not os.path.exists(python):
        say(f"making {name} with {executable}")
        if subprocess.call([executable, "-m", "venv", "--clear", folder]):
            raise SetupError(f"{executable} -m venv failed.")
    jax_text = f"JAX {jax}" if jax else "the newest JAX"
    say(f"installing autoremat[{extra}] with {jax_text}: a minute or more the first time")
    extras = sorted({extra} | present)
    requirements = ["--editable", f".[{','.join(extras)}]", "jax==" + jax if jax else "jax"]
    install(python, [*([] if jax else ["--upgrade"]), *requirements], os.path.join(folder, "install.log"))
    with open(stamp_path, "w", encoding="utf-8") as file:
        json.dump({"key": key, "extras": extras}, file)
    return folder


# Running


def say_versions(folder):
    code = (
        "import platform, importlib.metadata as m;"
        "print('Python', platform.python_version(), 'with JAX', m.version('jax'), 'and jaxlib', m.version('jaxlib'))"
    )
    say(subprocess.check_output([program(folder, "python"), "-c", code], text=True).strip())


def run_commands(commands, folder, arguments):
    """Run all commands, the last with the caller's arguments. The last exit code that is not 0, or 0."""
    env = dict(os.environ)
    env.setdefault("JAX_PLATFORMS", "cpu")
    env.setdefault("KERAS_BACKEND", "jax")
    # As an activated environment does, so that a tool finds the interpreter it belongs to.
    env["VIRTUAL_ENV"] = folder
    env["PATH"] = os.path.dirname(program(folder, "python")) + os.pathsep + env.get("PATH", "")
    code = 0
    for i, command in enumerate(commands):
        words = command.split() + (arguments if i == len(commands) - 1 else [])
        say("running " + " ".join(words))
        code = subprocess.call([program(folder, words[0]), *words[1:]], cwd=ROOT, env=env) or code
    return code


def parse(argv):
    """The options of this script, and the arguments for the program that runs."""
    parser = argparse.ArgumentParser(
        prog="dev.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("mode", choices=list(MODES))
    parser.add_argument("--python", metavar="X.Y[,X.Y]", help="Python to use; of several, the first found")
    parser.add_argument("--jax", metavar="VERSION", help="JAX to install (default: the newest that fits)")
    parser.add_argument("--fresh", action="store_true", help="make the environment anew")
    options, rest = parser.parse_known_args(argv)
    if options.mode == "types" and not (options.python or options.jax):
        options.python, options.jax = OLDEST  # the only Python whose NumPy has types for that same Python
    return options, rest[1:] if rest[:1] == ["--"] else rest


def main(argv=None):
    options, arguments = parse(argv)
    extra, commands = MODES[options.mode]
    try:
        executable, version = find_python(wanted_versions(options.python))
        folder = environment(executable, version, options.jax, extra, options.fresh)
        say_versions(folder)
        return run_commands(commands, folder, arguments)
    except SetupError as error:
        print(f"dev.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
