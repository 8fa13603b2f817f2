"""Every error that keylane raises on purpose.

One class per decision a caller can make. Each message says what was wrong and what to do about it.
"""

from __future__ import annotations

_UNAVAILABLE = 503


class KeylaneError(Exception):
    """Base of all errors raised by keylane."""

    is_transient: bool = False
    """Whether the same call may succeed later without anybody changing anything."""


class InvalidInput(KeylaneError, ValueError):
    """A value given by the caller breaks a rule; nothing was sent."""


# ---- the connection ---------------------------------------------------------------------------------


class ConnectError(KeylaneError):
    """No usable connection could be established."""


class ServerUnreachable(ConnectError):
    """None of the given servers answered."""

    is_transient = True


class AuthenticationFailed(ConnectError):
    """The server refused the credentials."""


class TlsFailed(ConnectError):
    """The server answered, but the TLS handshake failed."""


class ServerTooOld(ConnectError):
    """The server lacks something that keylane needs."""


class JetStreamDisabled(ConnectError):
    """The server or the account has no JetStream."""

    is_transient = True


class ProtocolViolation(ConnectError):
    """The peer does not speak the NATS protocol; the message has the beginning of its answer."""


class PermissionDenied(KeylaneError):
    """The server does not permit this user a required operation.

    `operation` is "publish" or "subscribe" and `subject` the subject; both are empty for Kafka's refusals.
    """

    def __init__(self, text: str, *, operation: str = "", subject: str = "") -> None:
        self.operation = operation
        self.subject = subject
        super().__init__(text)


class Disconnected(KeylaneError):
    """The connection was lost or closed while an answer was outstanding."""

    is_transient = True


# ---- JetStream --------------------------------------------------------------------------------------


class RequestTimeout(KeylaneError, TimeoutError):
    """The server did not answer a request within its deadline."""

    is_transient = True


class ApiUnavailable(KeylaneError):
    """Nobody answers on the JetStream API subject, or something other than JetStream does."""

    is_transient = True


class ApiError(KeylaneError):
    """The JetStream API answered with an error.

    `code` is the HTTP-like class, `err_code` the exact reason, `description` the server's text.
    """

    def __init__(self, code: int, err_code: int, description: str, *, doing: str = "", text: str = "") -> None:
        self.code = code
        self.err_code = err_code
        self.description = description
        self.doing = doing
        self.is_transient = code == _UNAVAILABLE
        prefix = f"{doing}: " if doing else ""
        super().__init__(text or f"{prefix}{description} (code {code}, error {err_code})")


class NotFound(ApiError):
    """The stream, consumer or message does not exist.

    `stream` and `consumer` are the names that were not found; both are empty where a message is missing.
    """

    def __init__(
        self,
        code: int,
        err_code: int,
        description: str,
        *,
        doing: str = "",
        text: str = "",
        stream: str = "",
        consumer: str = "",
        names_are_listed: bool = False,
    ) -> None:
        self.stream = stream
        self.consumer = consumer
        self.names_are_listed = names_are_listed
        super().__init__(code, err_code, description, doing=doing, text=text)


class AckFailed(KeylaneError):
    """The server did not confirm an ack; it may or may not count."""

    is_transient = True


class AlreadySettled(KeylaneError):
    """The message was already acked, nacked or terminated."""


class NotADelivery(KeylaneError):
    """A message in a reader's inbox is not from a consumer: it has no sequence, and an ack is impossible."""


class FeedEnded(KeylaneError):
    """A feed cannot continue; the message says why and what to do."""


class ConsumerGone(FeedEnded):
    """The consumer or its stream was deleted."""


class PullRefused(FeedEnded):
    """The server refuses this reader's pulls; retrying cannot help."""


class PriorityGroupMissing(PullRefused):
    """The consumer has a priority group and the pull named none: read it with `keylane.priority`."""


class PriorityGroupInvalid(PullRefused):
    """The consumer has no priority group with the name in the pull."""


class NotAnOverflowConsumer(PullRefused):
    """`min_pending` or `min_ack_pending` was sent to a consumer without the policy overflow."""


class NotAPinnedConsumer(PullRefused):
    """A pin id was sent to a consumer without the policy pinned_client: the consumer was replaced by another one."""


class PriorityOutOfRange(PullRefused):
    """The priority of a pull is not 0 to 9."""


class MessageTooLarge(FeedEnded):
    """The next message is larger than the feed's byte bound."""


class PublishFailed(KeylaneError):
    """A message was not stored, or its outcome is unknown."""


class PublishRejected(PublishFailed, ApiError):
    """The stream refused the message; it is not stored."""


class PublishDenied(PublishFailed, PermissionDenied):
    """This user may not publish to the subject; the message is not stored."""


class NotStored(PublishFailed):
    """No stream took the message: none has its subject, or its leader is temporarily away."""

    is_transient = True


class OutcomeUnknown(PublishFailed):
    """The link or the server was lost before the answer: the message may or may not be stored."""

    is_transient = True


class RevisionConflict(KeylaneError):
    """Somebody else wrote the key first; nothing was written."""


class ReadIncomplete(KeylaneError):
    """A read from the stream stopped before its end marker; do not treat its result as complete."""

    is_transient = True


# ---- Spark ------------------------------------------------------------------------------------------


class JavaMissing(KeylaneError):
    """No Java that is new enough for Spark was found, and none could be provided."""


class DataLost(KeylaneError):
    """Messages that a query should have read are gone from the stream, and the query is set to fail in that case."""


class QueryFenced(KeylaneError):
    """This driver no longer holds the query's lease, or its JVM is gone: another driver may run the query."""


class AcknowledgeRefused(KeylaneError):
    """Acknowledging would delete messages that somebody else still reads; nothing was deleted."""


class LakeConflict(KeylaneError):
    """The table holds other messages than the run reads; nothing was written."""


class LakeBroken(KeylaneError):
    """The table's disk or its state prevents a change; earlier changes are kept."""


class FunctionFailed(KeylaneError):
    """A function given to `in_key_order` raised, or its result does not fit the schema; the message names the key."""


class RowRejected(KeylaneError):
    """A row can never be published as it is: change it, omit it, or let it become a dead letter."""


class WriteFailed(KeylaneError):
    """Rows were not confirmed in time, or ended up in another stream; confirmed rows are stored."""


# ---- the embedded server ----------------------------------------------------------------------------


class ServerStartFailed(KeylaneError):
    """The embedded nats-server did not start."""


class ServerBinaryMissing(ServerStartFailed):
    """No nats-server program was found, or none that is new enough."""


class StoreInUse(ServerStartFailed):
    """Another running server uses the same store directory."""


class ServerEnded(KeylaneError):
    """The embedded nats-server ended unexpectedly."""


# ---- groups -----------------------------------------------------------------------------------------


class GroupError(KeylaneError):
    """A consumer group cannot do what was asked."""


class BrokenRetry(GroupError):
    """A message in a stream of delayed retries is none."""


class NoSuchGroup(GroupError):
    """The stream has no group of this name."""


class BrokenGroupRecord(GroupError):
    """The stored configuration of a group cannot be read; nothing was changed or deleted."""


class GroupConflict(GroupError):
    """The group's place is taken: by another configuration, or by another group's stream."""


class NotAMember(GroupError):
    """The group's configuration does not list this member."""


class Fenced(GroupError):
    """This instance no longer owns the message, and the new owner has begun. Nothing was written."""


class LedgerMismatch(Fenced):
    """The database's state of a group does not match the server: nothing is written until an operator decides."""


class TokenWentBack(LedgerMismatch):
    """The group's record is older than one that the database has seen: its bucket was restored. An operator decides."""


class StreamMadeAnew(LedgerMismatch):
    """The stream is not the one whose messages the database knows: forget those, or restore the stream."""


class GroupEnded(GroupError):
    """The group was deleted or changed in a way that its members cannot follow."""


# ---- handlers ---------------------------------------------------------------------------------------


class FleetError(KeylaneError):
    """A fleet cannot do what was asked."""


class NoSuchFleet(FleetError):
    """There is no fleet of this name."""


class BrokenFleetRecord(FleetError):
    """A record of a fleet cannot be read; nothing was changed. The message names the key and the field."""


class CopyMissing(FleetError):
    """The copy of a stream that a fleet reads is gone; the leader makes it again."""

    is_transient = True


class FleetEnded(FleetError):
    """The worker of a fleet cannot go on."""


class ConsumerUpdateFailed(FleetError):
    """The filters of a worker's consumer are not what was asked for. The consumer works on as it was."""


class SubjectCapExceeded(ConsumerUpdateFailed):
    """More subjects than one consumer may have."""


class ConsumerUpdateUnconfirmed(ConsumerUpdateFailed):
    """The server did not answer, or the connection is down. The change is tried again in the background."""

    is_transient = True


class ConsumerUpdateCancelled(ConsumerUpdateFailed):
    """The consumer was closed before the change was done."""


class HandlerCrashed(KeylaneError):
    """A handler or a hook raised an exception that cannot count as a failed try: its member or consumer has ended.

    The cause is that exception. The message was not acked.
    """


class InvalidPayload(KeylaneError, ValueError):
    """The payload of a message is not what its handler takes. No further try: it becomes a dead letter at once.

    A handler may raise it too.
    """


class HandlerProcessDied(KeylaneError):
    """The handler's process ended before the handler was done."""


class RemoteError(KeylaneError):
    """An exception of a handler in another process, as text: its traceback, or an exception that cannot be pickled."""


class SupervisorFailed(KeylaneError):
    """The worker processes of a command cannot begin."""


# ---- the journal ------------------------------------------------------------------------------------


class JournalError(KeylaneError):
    """The journal cannot be written or read."""


class JournalConflict(JournalError):
    """The journal's stream exists with settings that it cannot work with, or another stream is in its place."""


class BrokenJournal(JournalError):
    """A message in the journal's stream is not a complete batch of records."""


class JournalTooNew(JournalError):
    """A batch of records has a version that this keylane does not know."""


# ---- marshal ----------------------------------------------------------------------------------------


class CoordinationLogError(KeylaneError):
    """The coordination log cannot be used."""


class UnsafeLog(CoordinationLogError):
    """The log has settings that would lose or reorder claims; nothing was written."""


class LogReplaced(CoordinationLogError):
    """The log is not the one that was read before: it was deleted, truncated or recreated. Claims are void: stop."""


class TwoHashes(CoordinationLogError):
    """The log has records where another hash puts them: a partition could have two owners. Stop all consumers."""


class NoSuchTopic(KeylaneError):
    """The source has no topic of this name, or this user may not see it."""


class TopicReplaced(KeylaneError):
    """The topic is not the one that was read before: it was truncated or recreated. Positions are void: stop."""


# ---- Kafka ------------------------------------------------------------------------------------------


class BrokerUnavailable(KeylaneError):
    """Kafka is temporarily unable: a leader is being elected, or too few copies are in sync. Try again."""

    is_transient = True


class KafkaRefused(KeylaneError):
    """A broker or the client library refused; retrying cannot help. `code` and `name` are Kafka's own."""

    def __init__(self, code: int, name: str, text: str) -> None:
        self.code = code
        self.name = name
        super().__init__(text)


# ---- exactly once -----------------------------------------------------------------------------------


class ExtraMissing(KeylaneError, ImportError):
    """The dependencies of this part of keylane are not installed."""


class WrongTables(KeylaneError):
    """The database has tables with keylane's names that are not keylane's; nothing was written."""


def __dir__() -> list[str]:
    return sorted(name for name, value in globals().items() if isinstance(value, type))
