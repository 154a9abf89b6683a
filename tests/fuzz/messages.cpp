#include "tests/fuzz/messages.h"

#include <ATen/ATen.h>

#include <deque>
#include <map>
#include <numeric>

#include "lockstep/base/error.h"
#include "tests/fuzz/laid_out.h"
#include "tests/fuzz/oracle.h"

namespace lockstep::fuzz {
namespace {

/// One message that this rank sends or receives.
struct End {
  Message message;
  bool sends = false;
  bool fails = false;  ///< One of the two deviates.
  LaidOut tensor;
  Work work;
  bool failed = false;
};

std::string text_of(const End& end) {
  return "message from " + std::to_string(end.message.from) + " to " +
         std::to_string(end.message.to) + " with tag " + std::to_string(end.message.tag) + " of " +
         c10::str(end.message.values.sizes(), " ", end.message.values.toString()) + " (" +
         end.tensor.text() + ")";
}

class RunningMessages : public Running {
 public:
  explicit RunningMessages(const Call& call)
      : call_(call), step_(call.mine()), random_(step_.key, static_cast<uint64_t>(call.rank()), 4) {
    // A deviant's messages are those of the others, but for its tensors.
    const auto agreed = messages_of(call.step, call.group.size());
    const auto mine = messages_of(step_, call.group.size());
    for (size_t i = 0; i < agreed.size(); ++i) {
      const bool sends = agreed[i].from == call.rank();
      if (!sends && agreed[i].to != call.rank()) continue;
      End end{mine[i], sends, false, {}, {}, false};
      end.fails = agreed[i].from == call.deviant || agreed[i].to == call.deviant;
      LayoutChoice choice;
      choice.plain_only = call.group.carrier == Carrier::gloo;
      choice.repeated = step_.repeated;
      choice.is_input = sends;
      const at::Tensor& values = end.message.values;
      end.tensor = lay_out(sends ? values : at::zeros_like(values, at::MemoryFormat::Contiguous),
                           random_, choice);
      ends_.push_back(std::move(end));
    }
  }

  void wait() override {
    std::vector<size_t> order(ends_.size());
    std::iota(order.begin(), order.end(), 0);
    shuffle(order, random_);
    for (const size_t i : order) {
      auto& end = ends_[i];
      if (end.work) outcome(end, [&] { end.work.wait(); });
    }
  }

  void check() override {
    for (const auto& end : ends_) {
      if (end.failed) continue;
      const std::string found =
          difference(end.tensor, end.sends ? at::Tensor() : end.message.values);
      if (!found.empty()) throw Finding(text_of(end) + ": " + found);
    }
  }

 protected:
  /// Does a part of a message's way, which must fail if the message does.
  template <class Part>
  void outcome(End& end, const Part& part) {
    try {
      part();
    } catch (const MismatchError& error) {
      if (!end.fails) throw;
      expect_name(error);
      end.failed = true;
      return;
    }
    if (end.fails) throw Finding(text_of(end) + " arrived, though its two calls differ");
  }
  void expect_name(const std::exception& error) const {
    const int deviant = call_.group.members[static_cast<size_t>(call_.deviant)];
    if (!names_rank(error.what(), deviant))
      throw Finding("the error does not name rank " + std::to_string(deviant) + ": " +
                    error.what());
  }
  const ProcessGroup& group() const { return call_.group.handle; }

  const Call call_;
  const Step step_;
  KeyedRandom random_;
  std::vector<End> ends_;
};

class RunningExchange final : public RunningMessages {
 public:
  explicit RunningExchange(const Call& call) : RunningMessages(call) {
    // All ranks alike. Where calls differ a blocking call may wait for one that never comes.
    if (call.step.key % 4 == 0 && call.deviant < 0) {
      one_after_the_other();
    } else if (random_.below(3) == 0) {
      batch();
    } else {
      for (const size_t i : any_order()) begin(ends_[i]);
    }
  }

 private:
  void one_after_the_other() {
    for (auto& end : ends_) {
      at::Tensor tensor = end.tensor.view;
      if (end.sends) {
        group().send(tensor, end.message.to, end.message.tag);
      } else {
        group().recv(tensor, end.message.from, end.message.tag);
      }
    }
  }

  void begin(End& end) {
    at::Tensor tensor = end.tensor.view;
    end.work = end.sends ? group().isend(tensor, end.message.to, end.message.tag)
                         : group().irecv(tensor, end.message.from, end.message.tag);
  }

  void batch() {
    std::vector<P2POp> ops;
    const auto order = any_order();
    for (const size_t i : order) {
      const auto& end = ends_[i];
      ops.push_back({end.sends ? P2POp::Kind::send : P2POp::Kind::recv, end.tensor.view,
                     end.sends ? end.message.to : end.message.from, end.message.tag});
    }
    const auto works = group().batch_isend_irecv(ops);
    if (works.size() != ops.size()) throw Finding("batch_isend_irecv gave too few works");
    for (size_t i = 0; i < order.size(); ++i) ends_[order[i]].work = works[i];
  }

  /// A random order in which the messages of a channel keep theirs.
  std::vector<size_t> any_order() {
    std::vector<size_t> order(ends_.size());
    std::iota(order.begin(), order.end(), 0);
    shuffle(order, random_);
    std::map<std::pair<bool, int>, std::deque<size_t>> channels;
    const auto channel = [&](const End& end) {
      return std::pair(end.sends, end.sends ? end.message.to : end.message.from);
    };
    for (size_t i = 0; i < ends_.size(); ++i) channels[channel(ends_[i])].push_back(i);
    for (auto& place : order) {
      auto& waiting = channels[channel(ends_[place])];
      place = waiting.front();
      waiting.pop_front();
    }
    return order;
  }
};

class RunningCollection final : public RunningMessages {
 public:
  explicit RunningCollection(const Call& call) : RunningMessages(call) {
    if (call.rank() == call.step.root) {
      receive_all();
    } else if (random_.below(2) == 0) {
      outcome(ends_[0], [&] { group().send(ends_[0].tensor.view, call.step.root, call.step.tag); });
    } else {
      ends_[0].work = group().isend(ends_[0].tensor.view, call.step.root, call.step.tag);
    }
  }

 private:
  /// Which message a tensor gets is known when it has come.
  void receive_all() {
    std::map<int, End> awaited;
    std::vector<LaidOut> tensors;
    size_t failures = 0;
    for (auto& end : ends_) {
      failures += end.fails ? 1 : 0;
      tensors.push_back(end.tensor);
      awaited.emplace(end.message.from, std::move(end));
    }
    ends_.clear();
    for (auto& tensor : tensors) {
      int source = -1;
      try {
        source = group().recv_any(tensor.view, call_.step.tag);
      } catch (const MismatchError& error) {
        if (failures-- == 0) throw;
        expect_name(error);
        continue;
      }
      auto met = awaited.extract(source);
      if (!met || met.mapped().fails)
        throw Finding("recv_any has a message of rank " + std::to_string(source) +
                      (met ? " though its two calls differ" : " more than it sent"));
      met.mapped().tensor = tensor;
      ends_.push_back(std::move(met.mapped()));
    }
  }
};

}  // namespace

std::unique_ptr<Running> start_exchange(const Call& call) {
  return std::make_unique<RunningExchange>(call);
}

std::unique_ptr<Running> start_collection(const Call& call) {
  return std::make_unique<RunningCollection>(call);
}

}  // namespace lockstep::fuzz
