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
    """No usable connection could be made."""


class ServerUnreachable(ConnectError):
    """None of the given servers answered."""

    is_transient = True


class AuthenticationFailed(ConnectError):
    """The server answered and refused the credentials."""


class TlsFailed(ConnectError):
    """The server answered, and the two sides could not agree on TLS."""


class ServerTooOld(ConnectError):
    """The server lacks something that keylane needs."""


class JetStreamDisabled(ConnectError):
    """The server or the account has no JetStream."""

    is_transient = True


class ProtocolViolation(ConnectError):
    """What answers does not speak the NATS protocol; the message has the beginning of what was received."""


class PermissionDenied(KeylaneError):
    """The server does not let this user do what was needed.

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
    """Nobody answers on the JetStream API subject, or what answers is not JetStream."""

    is_transient = True


class ApiError(KeylaneError):
    """The JetStream API answered with an error.

    `code` is the HTTP-like class, `err_code` the exact reason, `description` the server's own words.
    """

    def __init__(self, code: int, err_code: int, description: str, *, doing: str = "") -> None:
        self.code = code
        self.err_code = err_code
        self.description = description
        self.doing = doing
        self.is_transient = code == _UNAVAILABLE
        prefix = f"{doing}: " if doing else ""
        super().__init__(f"{prefix}{description} (code {code}, error {err_code})")


class NotFound(ApiError):
    """The stream, consumer or message is not there."""


class AckFailed(KeylaneError):
    """The server did not confirm an ack: whether it counts is unknown."""

    is_transient = True


class AlreadySettled(KeylaneError):
    """The message was acked, naked or terminated before."""


class NotADelivery(KeylaneError):
    """A message in a reader's inbox is not from a consumer: it has no sequence and cannot be acked."""


class FeedEnded(KeylaneError):
    """A feed cannot go on; the message says why and what to do."""


class ConsumerGone(FeedEnded):
    """The consumer or its stream was deleted."""


class PullRefused(FeedEnded):
    """The server refuses this reader's pulls: asking again cannot help."""


class PriorityGroupMissing(PullRefused):
    """The consumer has a priority group and the pull named none: read it with `keylane.priority`."""


class PriorityGroupInvalid(PullRefused):
    """The consumer has no priority group of the name that the pull gave."""


class NotAnOverflowConsumer(PullRefused):
    """`min_pending` or `min_ack_pending` was sent to a consumer without the policy overflow."""


class NotAPinnedConsumer(PullRefused):
    """A pin id was sent to a consumer without the policy pinned_client: it was replaced by another one."""


class PriorityOutOfRange(PullRefused):
    """The priority of a pull is not 0 to 9."""


class MessageTooLarge(FeedEnded):
    """The next message is larger than the feed's byte bound."""


class PublishFailed(KeylaneError):
    """A publish was not stored, or it is not known whether it was."""


class PublishRejected(PublishFailed, ApiError):
    """The stream refused the message; it is not stored."""


class PublishDenied(PublishFailed, PermissionDenied):
    """This user may not publish to the subject; the message is not stored."""


class NotStored(PublishFailed):
    """No stream took the message: none has its subject, or its leader is away for the moment."""

    is_transient = True


class OutcomeUnknown(PublishFailed):
    """The link or the server went away before the answer: the message may or may not be stored."""

    is_transient = True


class RevisionConflict(KeylaneError):
    """Somebody else wrote the key first; nothing was written."""


class ReadIncomplete(KeylaneError):
    """A read from the stream ended before its end marker; nothing of it may be used as complete."""

    is_transient = True


# ---- Spark ------------------------------------------------------------------------------------------


class JavaMissing(KeylaneError):
    """No Java new enough for Spark was found, and none could be provided."""


class DataLost(KeylaneError):
    """Messages that a query should have read are gone from the stream, and it was told to fail then."""


class QueryFenced(KeylaneError):
    """This driver does not hold the query's lease any more, or its JVM is gone: another driver may run the query."""


class AcknowledgeRefused(KeylaneError):
    """Acknowledging would delete what somebody else still reads; nothing was deleted."""


class LakeConflict(KeylaneError):
    """The table is of other messages than the run reads; nothing was written."""


class LakeBroken(KeylaneError):
    """The table's disk or its state does not let it be changed; what was decided before stands."""


class FunctionFailed(KeylaneError):
    """A function given to `in_key_order` raised, or returned what does not fit; the message names the key."""


class RowRejected(KeylaneError):
    """A row cannot be published as it is, now or later: change it, leave it out, or let it become a dead letter."""


class WriteFailed(KeylaneError):
    """Rows were not confirmed in time, or ended up in another stream; those that were are stored."""


# ---- the embedded server ----------------------------------------------------------------------------


class ServerStartFailed(KeylaneError):
    """The embedded nats-server did not come up."""


class ServerBinaryMissing(ServerStartFailed):
    """There is no nats-server program, or none that is new enough."""


class StoreInUse(ServerStartFailed):
    """Another running server stores in the same directory."""


class ServerEnded(KeylaneError):
    """The embedded nats-server ended by itself."""


# ---- groups -----------------------------------------------------------------------------------------


class GroupError(KeylaneError):
    """A consumer group cannot do what was asked."""


class NoSuchGroup(GroupError):
    """There is no group of this name on the stream."""


class BrokenGroupRecord(GroupError):
    """The stored configuration of a group cannot be read; nothing was changed or deleted."""


class GroupConflict(GroupError):
    """Something else stands where the group would: another configuration, or another group's stream."""


class NotAMember(GroupError):
    """The group's configuration does not list this member."""


class Fenced(GroupError):
    """This instance does not own the message any more: whoever does has begun. Nothing was written."""


class LedgerMismatch(Fenced):
    """What the database knows of a group does not fit the server: nothing is written until an operator decides."""


class TokenWentBack(LedgerMismatch):
    """The group's record is older than one that the database has seen: its bucket was restored. Accept it, or not."""


class StreamMadeAnew(LedgerMismatch):
    """The stream is not the one whose messages the database knows: forget those, or bring the stream back."""


class GroupEnded(GroupError):
    """The group was deleted or changed in a way that its members cannot follow."""


# ---- handlers ---------------------------------------------------------------------------------------


class HandlerCrashed(KeylaneError):
    """A handler, or a hook, raised something that cannot count as a failed try: its member or consumer has ended.

    The cause is what was raised. Its message was not acked.
    """


class HandlerProcessDied(KeylaneError):
    """The process that a handler ran in ended before the handler was done."""


class RemoteError(KeylaneError):
    """What a handler raised in another process, as text: the traceback there, or an exception that cannot be sent."""


# ---- the journal ------------------------------------------------------------------------------------


class JournalError(KeylaneError):
    """The journal cannot be written or read."""


class JournalConflict(JournalError):
    """The journal's stream is there with settings that it cannot work with, or another stream is in its place."""


class BrokenJournal(JournalError):
    """A message in the journal's stream is no whole batch of records."""


class JournalTooNew(JournalError):
    """A batch of records has a version that this keylane does not know."""


# ---- marshal ----------------------------------------------------------------------------------------


class CoordinationLogError(KeylaneError):
    """The coordination log cannot be used."""


class UnsafeLog(CoordinationLogError):
    """The log has settings that would lose claims or put them out of order; nothing was written."""


class LogReplaced(CoordinationLogError):
    """The log is not the one that was read before: it was deleted, cut off or made anew. Claims are void: stop."""


class TwoHashes(CoordinationLogError):
    """The log has records where another hash puts them: a partition could have two owners. Stop all consumers."""


class NoSuchTopic(KeylaneError):
    """The source has no topic of this name, or this user may not see it."""


class TopicReplaced(KeylaneError):
    """The topic is not the one that was read before: it was cut off or made anew. Positions are void: stop."""


# ---- Kafka ------------------------------------------------------------------------------------------


class BrokerUnavailable(KeylaneError):
    """Kafka cannot do it for the moment: a leader is being elected, or too few copies are in sync. Try again."""

    is_transient = True


class KafkaRefused(KeylaneError):
    """A broker, or the client library, refused; trying the same again cannot help. `code`, `name`: Kafka's own."""

    def __init__(self, code: int, name: str, text: str) -> None:
        self.code = code
        self.name = name
        super().__init__(text)


# ---- exactly once -----------------------------------------------------------------------------------


class ExtraMissing(KeylaneError, ImportError):
    """A part of keylane was asked for whose dependencies are not installed."""


class WrongTables(KeylaneError):
    """The database has tables with the names of keylane's that are not keylane's; nothing was written."""
