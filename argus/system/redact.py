"""Secrets in command lines: what looks like one is replaced before anything is stored, printed or logged.

A command line is there for everybody to read in /proc while its process lives; in a store it would stay for a month,
for other people. Found are values of options and variables that are named like secrets, also within a word or a text
(``--api-key X``, ``--env=HF_TOKEN=X``, ``{"password": "X"}``, ``X-Api-Key: X``), what follows a user's name (``-u
bob:X``), passwords and tokens in URLs, and tokens of a well-known form. Whatever looks like none of them is not found:
``MORE`` names what else can be left out.
"""

from __future__ import annotations

import functools
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

_HINT = r"pass|pw|psw|key|token|secret|cred|auth|sig|cookie|dsn|webhook|jwt|otp"
"""What each name of a secret has somewhere: most words have none of it, and are done with that."""
_WORDS = re.compile(
    r"pass(?:in|out|code|phrase)\Z|jwt\Z|otp\Z|creds?\Z|.*(?:passw|passphrase|secret|credential|webhook|authorization)"
)
_WEAK_WORDS = re.compile(
    r"(?:o?auth2?|dsn|cookies?|signature|sig|psw|pswd|(?:user|root|db|admin|bind|smtp)?pw"
    r"|(?:db|pg|user|root|admin|my|ssh|smtp|redis|mysql|ftp)?pass)\Z|(?!oldpwd)\w*pwd\Z"
)
_KEY = re.compile(r"(?!(?:mon|don|tur|hot|[lmpqr])key\Z)\w*(?:key|token)\Z")
_KEYS = re.compile(r"(?:keys|tokens)\Z")
_OF_KEYS = frozenset({"api", "access", "secret", "private", "auth", "bearer", "refresh", "session", "encryption", "hf"})
"""What stands before ``keys`` and ``tokens`` that are secrets: without it they are counted, or columns."""
_BEFORE = frozenset(
    {"num", "max", "min", "n", "total", "new", "pad", "eos", "bos", "unk", "mask", "sep", "cls", "vocab",
     "per", "image", "seq", "batch", "prompt", "response", "context", "generated", "special", "train", "eval",
     "global", "skip", "first", "last", "kv", "sort", "group", "primary", "foreign", "video", "audio", "speech",
     "input", "output", "label", "target", "text"}
)  # fmt: skip
_BEFORE_KEY = _BEFORE | {
    "public", "cache", "reward", "fn", "dataset", "column", "feature", "metric", "latency", "hash", "dict", "index",
    "question", "answer", "query", "chosen", "rejected", "messages", "caption",
}  # fmt: skip
_BEFORE_TOKEN = _BEFORE | {
    "boi", "eoi", "eod", "eot", "fim", "start", "end", "stop", "begin", "prefix", "suffix", "middle", "decoder",
    "draft", "position", "single", "second",
}  # fmt: skip
_BEFORE_PASS = frozenset(
    {"forward", "backward", "first", "second", "last", "single", "one", "two", "num", "max", "per"}
)
_AFTER = frozenset(
    {"dim", "dims", "size", "head", "heads", "len", "length", "bias", "norm", "count", "budget", "id", "ids", "type",
     "drop", "limit", "dispatcher", "shift", "padding", "mask", "states", "name", "names", "col", "column", "field",
     "rate", "embedding", "embeddings", "mixing", "index", "ratio", "prob", "probs", "loss", "level", "masking", "proj",
     "projection", "cache", "capacity", "groups", "chunk", "weights", "parallel", "fn", "func", "order", "block",
     "blocks", "position", "offset", "stride", "throughput", "accuracy", "imbalance", "permutation", "mode"}
)  # fmt: skip
_AFTER_KEY = _AFTER | {"value", "values"}
_AFTER_WEAK = frozenset(
    {"type", "mode", "method", "provider", "backend", "required", "enabled", "def", "conv", "dim", "size"}
)
"""What stands before and after ``token``, ``key``, ``auth``, ``pass`` in names of options that are no secrets:
``--pad-token-id``, ``--first-pass``, ``--auth-type``."""
_NOT = frozenset({"no", "not", "disable", "without", "enable", "require"})
"""How an option begins that takes no value: ``--no-auth``."""
_NO_SECRET = frozenset(
    {
        "",
        REDACTED,
        "true",
        "false",
        "none",
        "null",
        "yes",
        "no",
        "on",
        "off",
        "0",
        "1",
        "auto",
        "lambda",
        "str",
        "int",
        "bool",
    }
)
"""Values that hide nothing, whatever their name is: ``--use-auth-token True``."""
_AFTER_COLON = frozenset({"app", "application", "main", "create_app", "cli", "run", "latest", "asc", "desc"})
"""The same after a colon: modules and their functions, tags of images, orders."""
_SCHEMES = frozenset({"bearer", "basic", "token", "digest", "apikey", "negotiate"})
"""Words that stand before a secret in a header: ``Authorization: Token X``."""
_LOGINS = frozenset({"-u", "-U", "--user", "--proxy-user", "--userpwd"})
"""Options that many programs take ``user:password`` with, as curl does."""
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
_IN_URL = re.compile(r"(?<=[A-Za-z0-9])://([^\s/?#:\"'<>]*(?::(?:[^\s/\"'<>]*|[^\s/@]*))?)@")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*\Z")
_OF_USERS = frozenset(
    {"ssh", "sftp", "scp", "rsync", "git", "hg", "svn", "hdfs", "viewfs", "abfs", "abfss", "wasb", "wasbs", "s3", "s3a",
     "gs", "smb", "nfs", "clickhouse", "chdb", "postgres", "postgresql", "mysql", "mariadb", "mongodb", "ldap"}
)  # fmt: skip
"""Schemes of URLs in which a user or a container stands before ``@`` where there is no password; with others a token
stands there: ``https://X@host``."""
_IN_QUERY = re.compile(r"([?&;#]([\w.-]{1,60})=)[^&;#\s\"'<>]+")
_LOGIN = re.compile(r"([\"']?)([^\s:/@=\"']{1,64}):([^\s/\"'][^\s\"']*)([\"']?)")
_PAIR = re.compile(
    rf"(?<![\w./-])(?<!lambda )(?=[\w.-]*?(?:{_HINT}))([\w.-]+)(\\{{0,4}}[\"'])?[\])]?[ \t]{{0,8}}([=:])[=>]?",
    re.IGNORECASE,
)
"""A name and the sign behind it, also within quotes of its own, which may be escaped. A run of letters is a name from
its begin only, so that each is read once."""
_OPENED = re.compile(r"[ \t]{0,8}(\\{0,4}[\"']|[\[{(])?")
_NEXT = r"\s{{0,4}}\\{{0,4}}[\"']?[\w.-]{{1,200}}\\{{0,4}}[\"']?[ \t]{{0,8}}{sign}"
_BARE = {
    sign: re.compile(
        rf"(?:(?:{'|'.join(sorted(_SCHEMES))})[ \t]{{1,8}})?"
        rf"(?:[^\s,;&\"'}}\])]|[,;&](?!{_NEXT.format(sign=sign)}|\s|\Z)|[\"'}}\])](?![\"'}}\])]{{0,8}}(?:[\s,;&]|\Z)))*",
        re.IGNORECASE,
    )
    for sign in "=:"
}
"""A value without quotes: to the next space, to what is the next pair (``A_KEY=X,LANG=C``), or to what closes it."""
_WITHIN = {quote: re.compile(rf"(?:[^\\{quote}]+|\\.)*", re.DOTALL) for quote in "\"'"}
_OPTION_WITH = re.compile(r"-{1,2}[\w.-]{1,60}=[\"']?\Z")
_SPACE = re.compile(r"\s")
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
_BEARER = re.compile(r"((?:bearer|basic)\s{1,8})(?!--)[\w.~+/=-]{8,}", re.IGNORECASE)


def redacted(words: Sequence[str]) -> list[str]:
    """The words of a command line with ``***`` for what looks like a secret."""
    return _redacted(words, whole=True)


def in_text(text: str) -> str:
    """The same for a text with several words in it, as ``sh -c`` has it: all spaces stay."""
    pieces = re.split(r"(\s+)", _pairs(text))
    words = _redacted([piece for piece in pieces[::2] if piece], whole=False)
    at = iter(words)
    return _forms("".join(piece if number % 2 or not piece else next(at) for number, piece in enumerate(pieces)))


def _redacted(words: Sequence[str], *, whole: bool) -> list[str]:
    """``whole``: each is a word of a command line, and what ends with a colon (``X-Api-Key:``) names the next."""
    arguments: list[str] = []
    hidden_by = login = ""
    program = _Program()
    for word in words:
        if hidden_by and not (word.startswith("--") and len(word) > 2):
            name, hidden_by = hidden_by, ""
            if not _is_harmless(name, word):
                arguments.append(REDACTED)
                hidden_by = "" if name.startswith("-") or word.lower() not in _SCHEMES else name
                continue
        hidden_by = ""
        short = program.password_option(word)
        name, sign, value = word.partition("=")
        option = name.startswith("-")
        if word == short or (option and not sign and _is_secret(name) and not _is_flag(name)):
            hidden_by = word
        elif whole and word.endswith(":") and (pair := _last_pair(word)):
            hidden_by = pair
        before, login = login, word if word in _LOGINS and word != short else ""
        if short and word != short:
            arguments.append(f"{short}{REDACTED}")
        elif before and (found := _LOGIN.fullmatch(word)) and not _is_no_login(found[2], found[3]):
            arguments.append(f"{found[1]}{found[2]}:{REDACTED}{found[4]}")
        elif sign and name in _LOGINS and (found := _LOGIN.fullmatch(value)) and not _is_no_login(found[2], found[3]):
            arguments.append(f"{name}={found[1]}{found[2]}:{REDACTED}{found[4]}")
        elif sign and value and (option or re.fullmatch(r"[+~]*[\w.@/-]+", name)) and _hides(name, value):
            arguments.append(f"{name}={REDACTED}")
        elif not whole:
            arguments.append(word)  # of a text all words at once, by the caller
        elif _SPACE.search(word):
            arguments.append(in_text(word))  # such as a script for a shell
        else:
            arguments.append(_forms(_pairs(word)))
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
            known = _SHORT.get(word.strip("\"'`($;|&").rpartition("/")[2])
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


def _hides(name: str, value: str) -> bool:
    return _is_secret(name) and not _is_harmless(name, value)


def _is_secret(name: str) -> bool:
    """Whether a variable or option is named like a secret: ``--api-key``, ``WANDB_TOKEN``, ``dbPassword``."""
    return _named_like_one(name[-_MAX_NAME:])


@functools.lru_cache(maxsize=4096)
def _named_like_one(name: str) -> bool:
    if not re.search(_HINT, name, re.IGNORECASE):
        return False
    if re.match(r"-[DeE][A-Za-z_]", name):  # -DAPI_KEY, -eHF_TOKEN
        name = name[2:]
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    parts = [part for part in re.split(r"[^a-z0-9]+", snake) if part]
    for number, part in enumerate(parts):
        before = parts[number - 1] if number else ""
        after = parts[number + 1] if number + 1 < len(parts) else ""
        if _WORDS.match(part) or (_KEYS.match(part) and before in _OF_KEYS):
            return True
        if _KEY.match(part):
            of_key = part.endswith("key")
            known = before in (_BEFORE_KEY if of_key else _BEFORE_TOKEN) or after in (_AFTER_KEY if of_key else _AFTER)
        elif _WEAK_WORDS.match(part):
            known = after in _AFTER_WEAK or (part.endswith("pass") and before in _BEFORE_PASS)
        else:
            continue
        if not known:
            return True
    return False


def _is_flag(name: str) -> bool:
    """Whether an option takes no value by its name."""
    return re.split(r"[-_.]", name.lstrip("-").lower())[0] in _NOT


def _is_harmless(name: str, value: str) -> bool:
    """Whether a value is no secret, though its name is one's: a switch, or the folder that PWD and ``--pwd`` name."""
    value = value.strip("\"'")
    if value.lower() in _NO_SECRET:
        return True
    return name.strip("-").lower() == "pwd" and re.match(r"[/~.$]", value) is not None


def _is_named(name: str, value: str) -> bool:
    """Whether a name before a colon is something else than that of a secret: a host, a module, an image, a volume."""
    if value.startswith((":", "//")) or value in _AFTER_COLON:
        return True
    if re.search(r"pass|pw|psw", name, re.IGNORECASE):
        return False
    return value.startswith("/") or re.match(r"\d{2,5}(?:/|\Z)", value) is not None


def _is_no_login(user: str, password: str) -> bool:
    """Whether ``a:b`` are a user and a group, or a host and a port."""
    if user == password or (user.isdigit() and password.isdigit()):
        return True
    return password.isdigit() and len(password) <= 5 and re.fullmatch(r"localhost|[\d.]+", user) is not None


def _pairs(text: str) -> str:
    """A text with ``***`` for the values of names of secrets in it: ``--env=HF_TOKEN=X``, ``{"password": "X"}``,
    ``token:X``, ``Authorization: Basic X``."""
    pieces: list[str] = []
    copied = at = 0
    while found := _PAIR.search(text, at):
        at = found.end()
        if not _is_secret(found[1]):
            continue
        begin, end = _value(text, found)
        value = text[begin:end]
        if begin == end or _is_harmless(found[1], value) or (found[3] == ":" and _is_named(found[1], value)):
            continue
        pieces += text[copied:begin], REDACTED
        copied = at = end
    return "".join((*pieces, text[copied:]))


def _value(text: str, pair: re.Match[str]) -> tuple[int, int]:
    """Where the value of a pair begins and ends, without its quotes."""
    opened = _OPENED.match(text, pair.end())
    begin, opening = (opened.end(), opened[1]) if opened else (pair.end(), None)
    if opening and opening in "\"'":
        found = _WITHIN[opening].match(text, begin)
        return begin, found.end() if found else begin
    if opening and opening[0] == "\\":
        return begin, _before(text, opening, begin)
    if opening:
        return begin, _before(text, {"[": "]", "{": "}", "(": ")"}[opening], begin)
    quote = text[pair.start() - 1 : pair.start()]
    if quote and quote in "\"'" and not pair[2]:  # 'Authorization: Basic X'
        end = _before(text, quote, begin)
        return begin, end - (text[end - 1] == "\\")
    header = pair[3] == ":" and text[pair.end() : begin]
    if header and (not pair.start() or (pair.start() < 70 and _OPTION_WITH.match(text[: pair.start()]))):
        return begin, _before(text, "\n", begin)
    bare = _BARE[pair[3]].match(text, begin)
    return begin, bare.end() if bare else begin


def _before(text: str, sign: str, begin: int) -> int:
    """Where a sign is next; without one, where the text ends."""
    end = text.find(sign, begin)
    return len(text) if end < 0 else end


def _last_pair(word: str) -> str:
    """The name before the colon that a word ends with, if it is a secret's: ``{"password":``."""
    found = re.search(r"([\w.-]{1,200})[\"']?:\Z", word[-_MAX_NAME - 2 :])
    return found[1] if found and _is_secret(found[1]) else ""


def _forms(text: str) -> str:
    text = _IN_URL.sub(_without_login, text)
    text = _IN_QUERY.sub(lambda found: found[1] + REDACTED if _is_of_query(found[2]) else found[0], text)
    return _FORMS.sub(REDACTED, _BEARER.sub(rf"\g<1>{REDACTED}", text))


def _without_login(found: re.Match[str]) -> str:
    user, colon, password = found[1].partition(":")
    if colon:
        return f"://{user}:{REDACTED}@" if password else found[0]
    scheme = _SCHEME.search(found.string, max(0, found.start() - 20), found.start())
    kinds = set(scheme[0].lower().split("+")) if scheme else set()
    names_users = not kinds & {"http", "https"} and kinds & _OF_USERS
    return found[0] if names_users or not user else f"://{REDACTED}@"


def _is_of_query(name: str) -> bool:
    return name.lower() == "code" or _is_secret(name)


def quoted(words: Sequence[str]) -> str:
    """A command line for a log, as a shell would take it, without secrets."""
    return shlex.join(redacted(words))
