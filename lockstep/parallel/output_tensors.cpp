#include "lockstep/parallel/output_tensors.h"

#include "lockstep/base/error.h"

namespace lockstep::detail {

void throw_unknown_output(const std::string& type) {
  throw UsageError(
      "find_unused_parameters and static_graph must see the tensors that forward "
      "returns, and do not know where they are in a " +
          type,
      "say it, once, after the definition of that type:\n"
      "    template <> struct lockstep::OutputTensors<" +
          type + "> { template <class F> static void visit(" + type +
          "& o, F&& f) { lockstep::visit_tensors(o.FIELD, f); } };");
}

}  // namespace lockstep::detail
