#include "wire/status.h"

namespace dfkv {

std::string_view status_name(Status status) {
  switch (status) {
    case Status::kOk:
      return "ok";
    case Status::kAlready:
      return "already";
    case Status::kMissNotFound:
      return "not_found";
    case Status::kMissEvicted:
      return "evicted";
    case Status::kMissCorrupt:
      return "corrupt";
    case Status::kMissNamespaceUnknown:
      return "namespace_unknown";
    case Status::kMissPartMissing:
      return "part_missing";
    case Status::kMissNodeDown:
      return "node_down";
    case Status::kMissDeadline:
      return "deadline";
    case Status::kMissNotTaken:
      return "not_taken";
    case Status::kMissLength:
      return "length";
    case Status::kMissCancelled:
      return "cancelled";
    case Status::kMissExpired:
      return "expired";
    case Status::kAgainBusy:
      return "busy";
    case Status::kAgainNoMemory:
      return "no_memory";
    case Status::kAgainDraining:
      return "draining";
    case Status::kAgainDisk:
      return "disk";
    case Status::kRefusedUnsupported:
      return "unsupported";
    case Status::kRefusedBadRequest:
      return "bad_request";
    case Status::kRefusedTooLarge:
      return "too_large";
    case Status::kRefusedOverQuota:
      return "over_quota";
    case Status::kRefusedUnauthenticated:
      return "unauthenticated";
    case Status::kRefusedChecksum:
      return "checksum";
    case Status::kRefusedAborted:
      return "aborted";
    case Status::kRefusedNamespace:
      return "namespace";
    case Status::kRefusedLimit:
      return "limit";
  }
  switch (range_of(status)) {
    case StatusRange::kDone:
      return "done_other";
    case StatusRange::kMiss:
      return "miss_other";
    case StatusRange::kAgain:
      return "again_other";
    case StatusRange::kRefused:
      break;
  }
  return "refused_other";
}

}  // namespace dfkv
