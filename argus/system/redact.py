"""Secrets in command lines: what looks like one is replaced before anything is stored, printed or logged.

A command line is there for everybody to read in /proc while its process lives; in a store it would stay for a month,
for other people. Found are values of options that are named like secrets (``--api-key X``, ``HF_TOKEN=X``), passwords
in URLs, and tokens of a well-known form. Whatever looks like none of them is not found: ``MORE`` names what else can be
left out.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Collection, Sequence

REDACTED = "***"
PATH = r"(^|[\s'\"=:,(\[])/(?:[^\s'\"/:]+/)+"
"""The folders of an absolute path, after what stands before it. As RE2 takes it, too (Arrow)."""
MAX_CHARS = 32_768
"""A longer command line is cut there; the kernel allows 2 MB and more."""
MORE = ("arguments", "paths", "hosts")
"""What can be left out of a store besides secrets: command lines but for the program and its script; the folders of
paths, in rows of ranks, stacks and features; the names of hosts, which get another one made of a hash."""

_WORDS = re.compile(
    r"(?:o?auth2?|pwd|pass|passin|passout|dsn|cookie|signature|sig)\Z|.*(?:passw|passphrase|secret|credential|webhook)"
)
_KEY = re.compile(r"(?!(?:mon|don|tur|hot)key)\w*(?:key|token)\Z")
_BEFORE = frozenset(
    {"num", "max", "min", "n", "total", "new", "pad", "eos", "bos", "unk", "mask", "sep", "cls", "vocab",
     "per", "image", "seq", "batch", "prompt", "response", "context", "generated", "special", "train", "eval",
     "global", "skip", "first", "last", "kv", "sort", "group", "primary", "foreign"}
)  # fmt: skip
_AFTER = frozenset(
    {"dim", "dims", "size", "head", "heads", "value", "values", "len", "length", "bias", "norm", "count",
     "budget", "id", "ids", "type", "drop", "limit", "dispatcher", "shift", "padding", "mask", "states",
     "name", "names", "col", "column", "field", "rate", "embedding", "embeddings", "mixing"}
)  # fmt: skip
"""What stands before and after ``token`` and ``key`` in names of training options: ``--pad-token-id``."""
_SHORT = {
    **dict.fromkeys(("mysql", "mysqldump", "mysqladmin", "mysqlimport", "mysqlshow", "mariadb", "mariadb-dump"), "-p"),
    **dict.fromkeys(("mongo", "mongosh", "mongodump", "mongorestore", "mongoimport", "mongoexport"), "-p"),
    **dict.fromkeys(("sshpass", "7z", "7za"), "-p"), **dict.fromkeys(("zip", "unzip"), "-P"),
    **dict.fromkeys(("redis-cli", "valkey-cli"), "-a"), **dict.fromkeys(("ldapsearch", "ldapmodify", "ldapadd"), "-w"),
    **dict.fromkeys(("docker", "podman", "nerdctl", "buildah", "skopeo", "helm", "az"), "login -p"),
    "curl": "-u --user -U --proxy-user", "smbclient": "-U", "sqlcmd": "-P", "bcp": "-P", "kinit": "-w",
}  # fmt: skip
"""Options of well-known programs that take a password, as a word of its own or in the same word; of some only once a
subcommand was named."""
_MAX_NAME = 200
_IN_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s/:@]{0,200}):([^\s/@]{1,500})@")
_IN_QUERY = re.compile(r"([?&;]([\w.-]{1,60})=)[^&;\s]+")
_FORMS = re.compile(
    "|".join(
        (
            r"(?:hf|api_org)_[A-Za-z0-9]{20,}",  # Hugging Face
            r"sk-[A-Za-z0-9_-]{20,}",  # OpenAI, Anthropic and others
            r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}",
            r"(?:AKIA|ASIA)[A-Z0-9]{16}",  # AWS
            r"AIza[\w-]{35}|ya29\.[\w-]{20,}",  # Google
            r"xox[abeoprs]-[\w-]{10,}",  # Slack
            r"eyJ[\w-]{8,2000}\.[\w-]{8,4000}\.[\w-]*",  # a JSON web token
            r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*",
            r"(?<![0-9A-Fa-f])[0-9a-f]{40}(?![0-9A-Fa-f])",  # Weights & Biases; a git commit looks the same
        )
    ),
    re.DOTALL,
)
_BEARER = re.compile(r"((?:bearer|basic)\s{1,8})[\w.~+/=-]{8,}", re.IGNORECASE)


def redacted(words: Sequence[str]) -> list[str]:
    """The words of a command line with ``***`` for what looks like a secret."""
    arguments: list[str] = []
    hides = False
    program = _Program()
    for word in words:
        if hides and not (word.startswith("--") and len(word) > 2):
            arguments.append(REDACTED)
            hides = False
            continue
        short = program.password_option(word)
        name, sign, value = word.partition("=")
        option = name.startswith("-")
        hides = word == short or (option and not sign and _is_secret(name))
        if short and word != short:
            arguments.append(f"{short}{REDACTED}")
            continue
        if sign and value and _is_secret(name) and (option or re.fullmatch(r"[+~]*[\w.@/-]+", name)):
            arguments.append(f"{name}={REDACTED}")
        elif any(character.isspace() for character in word):
            arguments.append(_in_text(word))  # such as a script for a shell
        else:
            arguments.append(_forms(word))
    return arguments


class _Program:
    """Which program the words of a command line are of: launchers, shells and pipes name several, one after another."""

    def __init__(self) -> None:
        self._options: tuple[str, ...] = ()
        self._needs = ""
        self._before = ""

    def password_option(self, word: str) -> str:
        """The option that takes a password, if a word is it, or begins with it; else nothing."""
        before, self._before = self._before, word
        if not word.startswith("-"):
            known = _SHORT.get(os.path.basename(word.strip("\"'`($;|&")))
            # What an option is given is no program: --backend mysql.
            if known is not None and (not before.startswith("-") or before in ("-", "--")):
                options = known.split()
                self._needs = "" if options[0].startswith("-") else options.pop(0)
                self._options = tuple(options)
            elif word in ("|", ";", "&&", "||", "&") or word.endswith(";"):
                self._options = ()
            elif word == self._needs:
                self._needs = ""
            return ""
        if self._needs:
            return ""
        for option in self._options:
            if word == option or (len(option) == 2 and word.startswith(option) and len(word) > 2):
                return option
        return ""


def command_line(words: Sequence[str]) -> str:
    """The words of a command line as one text that may be stored and shown: without secrets, and of bounded length."""
    cut, room = list[str](), MAX_CHARS
    for word in words:
        cut.append(word[:room])
        room -= len(word) + 1
        if room <= 0:
            break
    return " ".join(redacted(cut))[:MAX_CHARS]


def more(command: str, what: Collection[str]) -> str:
    """A command line with still more left out.

    Args:
        command: Of ``command_line``.
        what: Some of ``MORE``.
    """
    words = command.split(" ")
    if "arguments" in what:
        words = _program(words)
    return " ".join(map(without_folders, words) if "paths" in what else words)


def without_folders(text: str) -> str:
    """A text with each absolute path replaced by its last component."""
    return re.sub(PATH, r"\1", text)


def host(name: str, what: Collection[str]) -> str:
    """A host's name, or with ``hosts`` one made of its hash: the same in each trace, so that hosts can be compared. Who
    knows a name can check whether it is this host's."""
    return f"host-{hashlib.sha256(name.encode()).hexdigest()[:10]}" if "hosts" in what else name


def _program(words: Sequence[str]) -> list[str]:
    """The program and what it runs: a script, a module; its arguments left out."""
    kept = [os.path.basename(word) for word in words[:1]]
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            kept += ["-m", next(rest, "")]
            break
        if not word.startswith("-"):
            if re.search(r"\.(py|sh)\Z", word):
                kept.append(os.path.basename(word))
            break
    return [*kept, "..."] if len(words) > len(kept) else kept


def _is_secret(name: str) -> bool:
    """Whether a variable or option is named like a secret: ``--api-key``, ``WANDB_TOKEN``, ``dbPassword``."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[-_MAX_NAME:]).lower()
    parts = [part for part in re.split(r"[^a-z0-9]+", snake) if part]
    for number, part in enumerate(parts):
        if _WORDS.match(part):
            return True
        before, after = parts[number - 1 : number], parts[number + 1 : number + 2]
        if _KEY.match(part) and not _BEFORE.intersection(before) and not _AFTER.intersection(after):
            return True
    return False


def _forms(text: str) -> str:
    text = _IN_URL.sub(rf"\1:{REDACTED}@", text)
    text = _IN_QUERY.sub(lambda found: found[1] + REDACTED if _is_secret(found[2]) else found[0], text)
    return _FORMS.sub(REDACTED, _BEARER.sub(rf"\g<1>{REDACTED}", text))


def _in_text(text: str) -> str:
    """The same for a text with several words in it, as ``sh -c`` has it."""
    pieces = re.split(r"(\s+)", text)
    words = redacted([piece for piece in pieces[::2] if piece])
    at = iter(words)
    return _forms("".join(piece if number % 2 or not piece else next(at) for number, piece in enumerate(pieces)))


def quoted(words: Sequence[str]) -> str:
    """A command line for a log, as a shell would take it, without secrets."""
    return shlex.join(redacted(words))
