"""``KafkaBroker``: a real Kafka on this machine, owned by this process."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from streams.broker import diagnosis
from streams.broker.guardian_handle import GRACE_SECONDS, GuardianHandle, held_lock
from streams.broker.jars import JarSet, Progress, errors_named, kafka_jars, require_space, silent
from streams.broker.probe import HOST, free_port, is_free, metadata
from streams.broker.security import ADMIN, LISTENER, ListenerSecurity, Tls, write_privately
from streams.broker.settings import ALONE, GuardedListener, Seat, server_settings
from streams.broker.template import formatted
from streams.errors import ConfigError, EmbeddedBrokerError
from streams.sak.java import Java, JavaError, find_java

log = logging.getLogger(__name__)

_PORT_ATTEMPTS = 5
_POLL_SECONDS = 0.02
_LEAST_SPACE = 8 << 20  # below, its first segments and indexes do not fit

_FAST_START = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")
_LOGGING = (
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss.SSS",
)


class KafkaBroker:
    """A single Kafka node that ends with this process, however this process ends.

    ``port``
        the client port on 127.0.0.1; by default a free one, kept over ``restart()``.
    ``data_dir``
        where topics are kept, made if missing; by default a temporary folder that ``stop()`` removes.
    ``durable``
        the virtual machine's ordinary settings, for long runs and load; by default those that start quickly.
    ``heap_mb``
        the largest Java heap.
    ``properties``
        further server properties (``server.properties`` names); they win over the defaults.
    ``tls``
        clients come by TLS, with certificates of a CA that is made at the start; ``"mutual"``: they show one, too.
    ``sasl``
        one or several of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 and OAUTHBEARER (tokens without signature are taken).
    ``acl``
        users may do only what ACLs allow, except the user ``admin``. Needs ``sasl``, or ``tls="mutual"``.
    ``users``
        name -> password ("": one is made up), or names, beside ``admin``. ``client_settings`` has what clients need.
    ``start_timeout``
        seconds until a start is given up.
    ``progress``
        called while Kafka is downloaded, the first time only.

    Use it as a context manager, or call ``start()`` and ``stop()``. Several may run side by side. Methods may be called
    from any thread; they block. Raised: ``EmbeddedBrokerError`` when Kafka cannot be fetched or started,
    ``ConfigError`` for a wrong argument.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        data_dir: Path | str | None = None,
        durable: bool = False,
        heap_mb: int = 512,
        properties: Mapping[str, str] | None = None,
        tls: Tls = False,
        sasl: str | Sequence[str] = (),
        acl: bool = False,
        users: Mapping[str, str] | Sequence[str] = (),
        start_timeout: float = 60.0,
        progress: Progress = silent,
    ) -> None:
        if port is not None and not 1 <= port <= 65535:
            raise ConfigError(f"port must be 1 to 65535, not {port}")
        if heap_mb < 128:
            raise ConfigError(f"heap_mb must be at least 128, not {heap_mb}: a smaller heap does not hold a broker")
        if start_timeout <= 0:
            raise ConfigError(f"start_timeout must be above 0 seconds, not {start_timeout}")
        self._wanted_port = port
        self._data_dir = Path(data_dir).expanduser().absolute() if data_dir is not None else None
        self._durable = durable
        self._heap_mb = heap_mb
        self._properties = dict(properties or {})
        self._security = ListenerSecurity.of(tls, sasl, acl, users)
        self._start_timeout = start_timeout
        self._progress = progress
        self._seat: Seat = ALONE
        self._lock = threading.RLock()
        self._kept: GuardianHandle | None = None
        self._folder: Path | None = None
        self._port: int | None = None
        self._plain_port: int | None = None
        self._owner = os.getpid()
        self._descriptors: tuple[int, ...] = ()
        self._files: tuple[Path, ...] = ()
        self._settings_file(Path(), 1, 2, 3)  # a wrong property is an error here, not at the start

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` for clients, from ``start()`` to ``stop()``, also while the broker is killed."""
        if self._port is None:
            raise EmbeddedBrokerError("the broker is not started: call start(), or use it as a context manager")
        return f"{HOST}:{self._port}"

    @property
    def plain_bootstrap_servers(self) -> str:
        """``host:port`` of the listener without TLS and login, as ``bootstrap_servers``: the same one without
        ``tls`` and ``sasl``, else one for administration by this process, at another port after each ``restart()``."""
        return f"{HOST}:{self._plain_port}" if self._plain_port is not None else self.bootstrap_servers

    @property
    def security_dir(self) -> Path | None:
        """The folder with ``ca.pem`` and a ``NAME.properties`` for each user (settings by librdkafka's names), from
        ``start()`` to ``stop()``; ``None`` without ``tls`` and ``sasl``."""
        return self._folder / "security" if self._folder is not None and self._security.is_on else None

    def client_settings(self, user: str = ADMIN, mechanism: str = "") -> dict[str, Any]:
        """Return the ``client_settings`` of a user, with his password; from ``start()`` to ``stop()``. ``mechanism``:
        by default the first of ``sasl``. Raises ``ConfigError`` for a user or a mechanism that the broker has not."""
        self._started()
        folder = self.security_dir
        return self._security.client_settings(folder, user, mechanism) if folder is not None else {}

    @property
    def pid(self) -> int | None:
        """Process number of the Java process while it lives."""
        kept = self._kept
        return kept.pid if kept else None

    @property
    def keeper_pid(self) -> int | None:
        """Process number of the keeper, which ends the broker on SIGTERM, from ``start()`` to ``stop()``."""
        kept = self._kept
        return kept.keeper_pid if kept else None

    @property
    def is_running(self) -> bool:
        """Check whether the Java process lives (a frozen one does)."""
        return self.pid is not None

    @property
    def data_dir(self) -> Path | None:
        """The folder with the broker's data, settings and ``kafka.log``, from ``start()`` to ``stop()``."""
        return self._folder

    def __repr__(self) -> str:
        where = f"{HOST}:{self._port}" if self._port else "not started"
        return f"<KafkaBroker {where}{'' if self.is_running or not self._port else ', not running'}>"

    # -- its life -----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start, and return once clients are served. The first time on a machine, fetch Kafka."""
        with self._lock:
            if self._kept is not None:
                raise EmbeddedBrokerError(f"the broker at {self.bootstrap_servers} is started already")
            if os.name != "posix":
                raise EmbeddedBrokerError(
                    "the embedded Kafka runs on Linux and macOS; name another one in KES_BOOTSTRAP_SERVERS, or use WSL"
                )
            self._owner = os.getpid()
            if self._wanted_port is not None and not is_free(self._wanted_port):
                raise diagnosis.port_taken(self._wanted_port)
            try:
                java = find_java()
            except JavaError as error:
                raise EmbeddedBrokerError(str(error)) from error
            jars = kafka_jars(self._progress)
            try:
                self._prepare(java, jars)
                self._bring_up(fixed=self._wanted_port is not None)
                self._security.add_scram_users(self.plain_bootstrap_servers)
            except BaseException:
                self._end()
                raise
        return self

    def stop(self) -> None:
        """End the broker, and remove its data unless ``data_dir`` was given. Safe to repeat."""
        with self._lock:
            self._end()

    def kill(self) -> None:
        """End the broker with SIGKILL, as a crash would. Its data stay for ``restart()``."""
        with self._lock:
            kept = self._started()
            kept.order("k")
            if not kept.wait_exit(GRACE_SECONDS):
                raise EmbeddedBrokerError(f"the broker (process {kept.pid}) does not end on SIGKILL")

    def shut_down(self) -> None:
        """End the broker in an orderly way. Its data stay for ``restart()``. Safe to repeat."""
        with self._lock:
            kept = self._started()
            if kept.pid is not None:
                kept.order("t")
                if not kept.wait_exit(2 * GRACE_SECONDS):
                    raise EmbeddedBrokerError(f"the broker (process {kept.pid}) does not end")

    def restart(self) -> None:
        """Start again on the same port and data; a running broker is stopped in an orderly way first."""
        with self._lock:
            self.shut_down()
            self._bring_up(fixed=True)

    def freeze(self) -> None:
        """Halt the process (SIGSTOP): connections stay open, nothing is answered."""
        self._started().order("f")

    def thaw(self) -> None:
        """Let a frozen process go on (SIGCONT)."""
        self._started().order("c")

    def belongs_to_keeper(self, *, descriptors: Sequence[int], files: Sequence[Path]) -> None:
        """Give the keeper open files to hold, and files to remove at its end. Before ``start()`` only."""
        self._descriptors, self._files = tuple(descriptors), tuple(files)

    def leave(self) -> int:
        """Let the broker outlive this process; returns the keeper's process number, which ends it on SIGTERM.

        Afterwards this object is as never started. Temporary data are removed when the broker ends.
        """
        with self._lock:
            kept = self._started()
            kept.leave()
            self._kept, self._port, self._plain_port, self._folder = None, None, None, None
            return kept.keeper_pid

    def __enter__(self) -> Self:
        return self if self._kept is not None else self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    # -- steps --------------------------------------------------------------------------------------------------------

    def _started(self) -> GuardianHandle:
        if self._kept is None:
            raise EmbeddedBrokerError("the broker is not started: call start(), or use it as a context manager")
        return self._kept

    def _prepare(self, java: Java, jars: JarSet) -> None:
        with errors_named(str(self._data_dir or tempfile.gettempdir())):
            if self._data_dir is None:
                self._folder = Path(tempfile.mkdtemp(prefix="kes-kafka-"))
            else:
                self._folder = self._data_dir
                self._folder.mkdir(parents=True, exist_ok=True)
        flags = [] if self._durable else list(_FAST_START)
        command = [str(java.binary), "-Xms64m", f"-Xmx{self._heap_mb}m", *flags, *_LOGGING, "-cp", jars.classpath]
        command += ["kafka.Kafka", str(self._folder / "server.properties")]
        throw_away = [] if self._data_dir is not None else [self._folder]
        # Kafka has a lock of its own, but reads the log of metadata before it asks for that, and may fall over a record
        # that the other broker is just writing.
        with errors_named(f"the data folder {self._folder}"), held_lock(self._folder / "kes.lock", 1.0) as lock:
            if lock is None:
                raise diagnosis.folder_taken(self._folder)
            formatted(self._folder / "data", java, jars, self._seat.node)
            if (secrets := self.security_dir) is not None:
                self._security.make_files(secrets)
            self._kept = GuardianHandle(
                command, self._folder / "kafka.log", throw_away, self._files, held=self._descriptors, lent=(lock,)
            )

    def _bring_up(self, *, fixed: bool) -> None:
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            port = self._port or self._wanted_port or free_port()
            if fixed and not is_free(port):
                raise diagnosis.port_taken(port)
            try:
                self._run(port)
            except diagnosis.PortTaken:
                # Another process was faster between the look for a free port and the broker's start. With a fixed port
                # that is free it was the controller's, which is looked for anew.
                if attempt == _PORT_ATTEMPTS or (fixed and not is_free(port)):
                    raise
            else:
                return

    def _run(self, port: int) -> None:
        """Start the process on this port, and wait until it serves."""
        kept, folder = self._started(), self._folder
        assert folder is not None
        require_space(folder, _LEAST_SPACE, "a broker's data")
        plain_port = free_port(frozenset((port,))) if self._security.is_on else port
        controller_port = self._seat.controller_port or free_port(frozenset((port, plain_port)))
        with errors_named(str(folder)):
            write_privately(
                folder / "server.properties", self._settings_file(folder, port, plain_port, controller_port)
            )
        log_file = folder / "kafka.log"
        read_from = log_file.stat().st_size
        began = time.monotonic()
        kept.start()
        while True:
            answer = metadata(plain_port)
            if answer is not None and self._seat.node in answer.brokers and answer.controller >= 0:
                break
            if kept.pid is None:
                raise diagnosis.ended(port, folder, diagnosis.tail(log_file, read_from))
            if time.monotonic() - began > self._start_timeout:
                kept.order("k")
                kept.wait_exit(GRACE_SECONDS)
                raise diagnosis.timed_out(self._start_timeout, diagnosis.tail(log_file, read_from))
            time.sleep(_POLL_SECONDS)
        if kept.pid is None:  # another server answered on that port
            raise diagnosis.port_taken(port)
        self._port, self._plain_port = port, plain_port
        log.info("Kafka serves at %s:%d after %.1f s (process %s)", HOST, port, time.monotonic() - began, kept.pid)

    def _settings_file(self, folder: Path, port: int, plain_port: int, controller_port: int) -> str:
        guarded = None
        if self._security.is_on:
            properties = self._security.properties(folder / "security")
            guarded = GuardedListener(LISTENER, port, self._security.protocol, properties)
        return server_settings(folder / "data", plain_port, controller_port, self._properties, self._seat, guarded)

    def _end(self) -> None:
        kept, folder = self._kept, self._folder
        self._kept, self._port, self._plain_port, self._folder = None, None, None, None
        if os.getpid() != self._owner:  # a forked copy that unwinds: the broker is not its own
            return
        if kept is not None:
            kept.close()
        if folder is not None and self._data_dir is None:
            shutil.rmtree(folder, ignore_errors=True)
