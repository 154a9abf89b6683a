#include "lockstep/comm/call_observer.h"

#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/comm/checks/checked_backend.h"
#include "lockstep/comm/group_impl.h"

namespace lockstep {

void observe_calls(const ProcessGroup& group, std::shared_ptr<CallObserver> observer) {
  if (!group) throw UsageError("observe_calls: the process group is null");
  set_call_observer(group.impl().backend(), std::move(observer));
}

}  // namespace lockstep
