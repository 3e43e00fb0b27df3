"""SASL mechanisms: the examples of their RFCs, kafka-python's messages, and brokers that are not what they seem."""

from __future__ import annotations

import base64
import hashlib
import hmac
import random
import sys
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from streams.kafka.wire.sasl import Credentials, Login, OAuthToken, SaslFailure, gssapi, oauthbearer, plain, scram
from streams.kafka.wire.security import Security

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # kafka-python's own use of importlib.resources
    from kafka.net.sasl import get_sasl_mechanism
    from kafka.net.sasl.oauth import AbstractTokenProvider

SECRET = "planted-secret"


def dialogue(login: Login, answers: list[bytes]) -> list[bytes | None]:
    """The messages to the broker; ``None`` in the end: the login is complete."""
    return [login.first(), *(login.next(answer) for answer in answers)]


def test_the_example_of_scram() -> None:
    """RFC 7677, section 3."""
    login = Login(scram("SCRAM-SHA-256", "user", "pencil", "rOprNGfwEbeRWgbNEkqO"))
    assert dialogue(
        login,
        [
            b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
            b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
        ],
    ) == [
        b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO",
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
        None,
    ]


def test_the_example_of_plain() -> None:
    """RFC 4616, section 4, with the name of the user as the identity too: Kafka takes no other one."""
    assert dialogue(Login(plain("tim", "tanstaaftanstaaf")), [b""]) == [b"tim\0tim\0tanstaaftanstaaf", None]


def test_the_example_of_oauthbearer() -> None:
    """RFC 7628, section 4.1, without a name and a channel."""
    token = OAuthToken("vF9dft4qmTc2Nvb3RlckBhbHRhdmlzdGEuY29tCg==", {"host": "server.example.com", "port": "143"})
    message = (
        b"n,,\x01auth=Bearer vF9dft4qmTc2Nvb3RlckBhbHRhdmlzdGEuY29tCg==\x01host=server.example.com\x01port=143\x01\x01"
    )
    assert dialogue(Login(oauthbearer(lambda: token)), [b""]) == [message, None]


def test_a_refused_token_is_acknowledged() -> None:
    """RFC 7628, section 4.3: the broker ends it, not we."""
    login = Login(oauthbearer(lambda: OAuthToken(SECRET)))
    login.first()
    assert login.next(b'{"status":"invalid_token","openid-configuration":"planted-secret"}') == b"\x01"
    with pytest.raises(SaslFailure, match="refuses the token") as failed:
        login.next(b"")
    assert SECRET not in str(failed.value)


class ScramBroker:
    """The broker's side of SCRAM for one user. A test replaces a part of an answer."""

    def __init__(self, mechanism: str, password: str, iterations: int = 4096) -> None:
        self.digest = mechanism.removeprefix("SCRAM-").replace("-", "").lower()
        self.salt = b"salt of the user"
        salted = hashlib.pbkdf2_hmac(self.digest, password.encode(), self.salt, iterations)
        self.client_key = hmac.digest(salted, b"Client Key", self.digest)
        self.server_key = hmac.digest(salted, b"Server Key", self.digest)
        self.iterations = iterations
        self.signed = b""

    def first(self, message: bytes) -> bytes:
        bare = message.removeprefix(b"n,,")
        nonce = bare.partition(b",r=")[2] + b"-and-more"
        answer = b"r=%s,s=%s,i=%d" % (nonce, base64.b64encode(self.salt), self.iterations)
        self.signed = b",".join((bare, answer, b"c=biws,r=" + nonce))
        return answer

    def final(self, message: bytes) -> bytes:
        """Check the proof, as RFC 5802 has it: its hash is what is stored."""
        signature = hmac.digest(hashlib.new(self.digest, self.client_key).digest(), self.signed, self.digest)
        proof = base64.b64decode(message.partition(b",p=")[2])
        assert bytes(a ^ b for a, b in zip(proof, signature, strict=True)) == self.client_key
        return b"v=" + base64.b64encode(hmac.digest(self.server_key, self.signed, self.digest))


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize(("username", "password"), [("alice", "secret"), ("a=b,c", "p,=w"), ("zoë", "ﬀ ª")])
def test_a_login_by_scram(mechanism: str, username: str, password: str) -> None:
    """Characters that separate are escaped in the name, and passwords are not prepared, as Kafka does not either."""
    broker, login = ScramBroker(mechanism, password), Credentials(mechanism, username, password).login_at("host")
    first = login.first()
    assert first.startswith(b"n,,n=%s,r=" % username.encode().replace(b"=", b"=3D").replace(b",", b"=2C"))
    message = login.next(broker.first(first))
    assert message is not None
    assert login.next(broker.final(message)) is None


def test_each_login_has_a_nonce_of_its_own() -> None:
    credentials = Credentials("SCRAM-SHA-256", "u", SECRET)
    assert len({credentials.login_at("host").first() for _ in range(100)}) == 100


def with_iterations(count: bytes) -> Callable[[bytes], bytes]:
    return lambda answer: answer.rpartition(b",i=")[0] + b",i=" + count


WRONG_FIRST: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another nonce": (lambda answer: answer.replace(b"r=", b"r=x", 1), "nonce"),
    "our nonce alone": (lambda answer: answer.replace(b"-and-more", b""), "nonce"),
    "too few iterations": (with_iterations(b"4095"), "4095 SCRAM iterations"),
    "a billion iterations": (with_iterations(b"1000000000"), "1000000000 SCRAM iterations"),
    "digits without an end": (with_iterations(b"9" * 5000), "no number"),
    "a negative number": (with_iterations(b"-4096"), "no number"),
    "a number in words": (with_iterations(b"4_096"), "no number"),
    "no salt": (lambda answer: answer.replace(b"s=", b"s=,x=", 1), "no message of SCRAM"),
    "an empty salt": (lambda answer: answer.split(b",s=")[0] + b",s=,i=4096", "no message of SCRAM"),
    "a salt that is none": (lambda answer: answer.replace(b"s=", b"s=!", 1), "no message of SCRAM"),
    "an extension that is needed": (lambda answer: b"m=x," + answer, "no message of SCRAM"),
    "another order": (lambda answer: b",".join(reversed(answer.split(b","))), "no message of SCRAM"),
    "nothing": (lambda _: b"", "no message of SCRAM"),
    "no text": (lambda _: bytes(range(256)), "no message of SCRAM"),
}


@pytest.mark.parametrize("what", WRONG_FIRST)
def test_a_wrong_first_answer_to_scram(what: str) -> None:
    changed, said = WRONG_FIRST[what]
    broker, login = ScramBroker("SCRAM-SHA-256", SECRET), Credentials("SCRAM-SHA-256", "u", SECRET).login_at("host")
    with pytest.raises(SaslFailure, match=said) as failed:
        login.next(changed(broker.first(login.first())))
    assert SECRET not in str(failed.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda _: b"v=" + base64.b64encode(bytes(32)), "signature is wrong"),
        (lambda answer: answer[:-8], "signature is wrong"),
        (lambda _: b"v=", "no message of SCRAM"),
        (lambda _: b"v=!!!!", "no message of SCRAM"),
        (lambda _: b"", "no message of SCRAM"),
        (lambda _: b"e=invalid-proof", "refuses the credentials"),
        (lambda answer: b"x=1," + answer, "no message of SCRAM"),
    ],
    ids=["another signature", "a short one", "an empty one", "no base64", "nothing", "an error", "another order"],
)
def test_a_broker_that_cannot_prove_itself(changed: Callable[[bytes], bytes], said: str) -> None:
    broker, login = ScramBroker("SCRAM-SHA-512", SECRET), Credentials("SCRAM-SHA-512", "u", SECRET).login_at("host")
    message = login.next(broker.first(login.first()))
    assert message is not None
    with pytest.raises(SaslFailure, match=said) as failed:
        login.next(changed(broker.final(message)))
    assert SECRET not in str(failed.value)


def test_garbage_is_a_failure_and_nothing_else() -> None:
    """Whatever a broker answers, at each step of each mechanism."""
    seed = random.randrange(2**32)
    print("seed", seed)
    source = random.Random(seed)
    for _ in range(500):
        broker = ScramBroker("SCRAM-SHA-256", SECRET) if source.random() < 0.02 else None
        login = source.choice([scram("SCRAM-SHA-256", "u", SECRET, "n"), plain("u", SECRET)])
        steps = Login(login)
        message: bytes | None = steps.first()
        if broker is not None and message is not None and message.startswith(b"n,,"):
            message = steps.next(broker.first(message))
        garbage = source.choice([b"r=n", b"v=", b"e=", b""]) + source.randbytes(source.randrange(1, 40))
        with pytest.raises(SaslFailure):
            steps.next(garbage)


UNSENDABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "a zero in the password": (lambda: plain("u", f"a\0{SECRET}"), "zero character"),
    "an empty token": (lambda: oauthbearer(lambda: OAuthToken("")), "token of oauth_cb"),
    "a token with a separator": (
        lambda: oauthbearer(lambda: OAuthToken(f"{SECRET}\x01auth=Bearer x")),
        "token of oauth_cb",
    ),
    "an extension named auth": (lambda: oauthbearer(lambda: OAuthToken(SECRET, {"auth": "x"})), "extension"),
    "an extension with digits": (lambda: oauthbearer(lambda: OAuthToken(SECRET, {"k1": "x"})), "extension"),
    "an extension with a separator": (lambda: oauthbearer(lambda: OAuthToken(SECRET, {"k": "x\x01y=z"})), "extension"),
}


@pytest.mark.parametrize("what", UNSENDABLE)
def test_credentials_that_cannot_be_sent(what: str) -> None:
    messages, said = UNSENDABLE[what]
    with pytest.raises(SaslFailure, match=said) as failed:
        Login(messages()).first()
    assert SECRET not in str(failed.value)


def test_an_answer_to_plain_is_none_of_kafka() -> None:
    login = Login(plain("u", SECRET))
    login.first()
    with pytest.raises(SaslFailure, match="not empty"):
        login.next(b"x")


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI"])
def test_no_secret_is_shown(mechanism: str) -> None:
    credentials = Credentials(mechanism, SECRET, SECRET, lambda: OAuthToken(SECRET))
    for thing in (credentials, credentials.login_at("host"), Security(None, credentials)):
        assert SECRET not in repr(thing)


# ---------------------------------------------------------------------- kafka-python says the same


def theirs(mechanism: str, **more: Any) -> Any:
    names = {"sasl_mechanism": mechanism, "sasl_plain_username": "alice", "sasl_plain_password": "sécret"}
    return get_sasl_mechanism(mechanism)(host="host", **names, **more)


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_the_same_bytes_by_scram(mechanism: str) -> None:
    other, broker = theirs(mechanism), ScramBroker(mechanism, "sécret", iterations=5000)
    nonce = other._scram_client.nonce.decode()
    login = Login(scram(mechanism, "alice", "sécret", nonce))
    first = login.first()
    assert first == other.auth_bytes()
    answer = broker.first(first)
    other.receive(answer)
    message = login.next(answer)
    assert message is not None
    assert message == other.auth_bytes()
    final = broker.final(message)
    other.receive(final)
    assert login.next(final) is None
    assert other.is_authenticated()


def test_the_same_bytes_by_plain() -> None:
    assert Login(plain("alice", "sécret")).first() == theirs("PLAIN").auth_bytes()


@pytest.mark.parametrize("extensions", [{}, {"a": "b"}, {"a": "b", "cd": "e f"}])
def test_the_same_bytes_by_oauthbearer(extensions: dict[str, str]) -> None:
    def fetch() -> OAuthToken:
        return OAuthToken("a.b-c", extensions)

    class Provider(AbstractTokenProvider):
        def token(self) -> str:
            return fetch().value

        def extensions(self) -> dict[str, str]:
            return dict(fetch().extensions)

    other = theirs("OAUTHBEARER", sasl_oauth_token_provider=Provider())
    login = Login(oauthbearer(fetch))
    assert login.first() == other.auth_bytes()
    other.receive(b'{"status":"invalid_token"}')
    assert login.next(b'{"status":"invalid_token"}') == other.auth_bytes()


class KerberosContext:
    """A context of the ``gssapi`` package: two steps, then messages that are wrapped."""

    def __init__(self, name: str, usage: str) -> None:
        self.name, self.usage, self.answers = name, usage, list[bytes | None]()

    @property
    def complete(self) -> bool:
        return len(self.answers) == 2

    def step(self, answer: bytes | None) -> bytes | None:
        self.answers.append(answer)
        return f"{self.name} step {len(self.answers)}".encode() if len(self.answers) < 2 else None

    def unwrap(self, message: bytes) -> Any:
        return SimpleNamespace(message=message.removeprefix(b"wrapped:"))

    def wrap(self, message: bytes, confidential: bool) -> Any:
        assert not confidential
        return SimpleNamespace(message=b"wrapped:" + message)


@pytest.fixture
def kerberos(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package, which needs a Kerberos library to be installed."""

    class Name(str):
        def __new__(cls, text: str, name_type: object) -> Name:
            return super().__new__(cls, text)

        def canonicalize(self, _: object) -> Name:
            return self

    module: Any = ModuleType("gssapi")
    module.Name, module.SecurityContext = Name, KerberosContext
    module.NameType, module.MechType = SimpleNamespace(hostbased_service=1), SimpleNamespace(kerberos=2)
    monkeypatch.setitem(sys.modules, "gssapi", module)


@pytest.mark.usefixtures("kerberos")
def test_the_same_bytes_by_gssapi() -> None:
    other, login = theirs("GSSAPI", sasl_kerberos_service_name="kafka"), Login(gssapi("kafka", "host"))
    said: list[tuple[bytes | None, bytes]] = [(login.first(), other.auth_bytes())]
    for answer in (b"token", b"wrapped:\x07\x00\x10\x00"):
        other.receive(answer)
        said.append((login.next(answer), other.auth_bytes()))
    assert [ours for ours, _ in said] == [message for _, message in said]
    assert said[-1][0] == b"wrapped:\x01\x00\x10\x00kafka@host"
    other.receive(b"")
    assert login.next(b"") is None
    assert other.is_authenticated()


@pytest.mark.usefixtures("kerberos")
@pytest.mark.parametrize("offer", [b"wrapped:\x06\x00\x10\x00", b"wrapped:", b"wrapped:\x01"])
def test_a_broker_that_wants_a_security_layer(offer: bytes) -> None:
    login = Login(gssapi("kafka", "host"))
    login.first()
    login.next(b"token")
    with pytest.raises(SaslFailure, match="security layer"):
        login.next(offer)


def test_gssapi_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gssapi", None)
    with pytest.raises(SaslFailure, match="needs the gssapi package"):
        Login(gssapi("kafka", "host")).first()
