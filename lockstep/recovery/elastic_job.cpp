#include "lockstep/recovery/elastic_job.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <sstream>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/store.h"
#include "lockstep/launch/generation_folder.h"
#include "lockstep/launch/start_ranks.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/state_dict.h"
#include "lockstep/recovery/shared_state.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using launch::Generation;
using launch::GenerationFolder;

/// From a failure on: the launcher sees the end of a process at once, and publishes.
constexpr std::chrono::seconds kPatience{5};
/// A host that has vanished is noticed by the end of its lease.
constexpr std::chrono::seconds kPatienceOverHosts{30};

at::Tensor bytes_of(const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  const std::string text = std::move(stream).str();
  const at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes;
}

void load_bytes(torch::optim::Optimizer& optimizer, const at::Tensor& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(static_cast<const char*>(bytes.const_data_ptr()),
                    static_cast<size_t>(bytes.numel()));
  optimizer.load(archive);
}

template <class Number>
ElasticJob::Part part_of(Number& number) {
  return {.get =
              [&number] {
                return StateDict{{"value", at::scalar_tensor(number, at::dtype<Number>())}};
              },
          .set = [&number](const StateDict& state) { number = state.at(0).second.item<Number>(); }};
}

std::optional<GenerationFolder> folder_of_launcher() {
  const auto folder = env_string(launch::kGenerationFolderVariable);
  return folder ? std::optional(GenerationFolder(*folder)) : std::nullopt;
}

/// That of the launcher, which outlives all ranks.
Store store_of_launcher() {
  TcpStoreOptions options;
  options.host = env_string("MASTER_ADDR").value_or(options.host);
  options.port = static_cast<uint16_t>(env_int("MASTER_PORT", 1, 65535).value_or(0));
  return tcp_store(options);
}

}  // namespace

class ElasticJob::Impl {
 public:
  explicit Impl(const StartOptions& options, std::set<int> sizes = {})
      : options_(options),
        sizes_(std::move(sizes)),
        folder_(folder_of_launcher()),
        first_(folder_ ? folder_->first() : Generation{}),
        worker_(static_cast<int>(env_int("RANK").value_or(0))) {}

  void add(const std::string& name, Part part) {
    for (const auto& named : parts_) {
      if (named.name == name) throw UsageError("ElasticJob: '" + name + "' was added twice");
    }
    parts_.push_back({name, std::move(part)});
  }
  void add_number(const std::string& name, Part part) {
    add(name, part);
    numbers_.push_back({std::move(part), {}});
  }

  void run(const std::function<void(World&)>& train) {
    keep_numbers();
    if (folder_) folder_->announce(worker_, sizes_);
    for (auto generation = first_generation(); generation; generation = next_generation()) {
      number_ = generation->number;
      if (run_generation(*generation, train)) return;
    }
  }

  void commit() {
    ++progress_.commits;
    keep_numbers();
    if (folder_ && folder_->has_after(number_)) {
      throw GenerationEnded("generation " + std::to_string(number_) + " has ended",
                            "let this exception pass: ElasticJob::run catches it");
    }
  }
  void leave() {
    if (folder_) folder_->leave(worker_, number_);
  }
  int64_t commits() const { return progress_.commits; }
  int64_t generation() const { return progress_.begins ? 0 : std::max<int64_t>(number_, 1); }

  bool spans_hosts() const { return first_.of_hosts.has_value(); }

  std::shared_ptr<const void> kept;

 private:
  struct Number {
    Part part;
    StateDict committed;
  };

  void keep_numbers() {
    for (auto& number : numbers_) number.committed = number.part.get();
  }
  void restore_numbers() {
    for (const auto& number : numbers_) number.part.set(number.committed);
  }

  /// A process that takes a dead one's place waits until it is a member.
  std::optional<Generation> first_generation() {
    if (!folder_ || !(folder_->has_after(0) || folder_->is_promised(1))) return first_;
    return await_generation();
  }

  std::optional<Generation> next_generation() {
    auto next = await_generation();
    if (!next && failure_) std::rethrow_exception(failure_);
    return next;
  }

  /// A new process may come late, as may the others to their next commit.
  bool is_worth_waiting() const {
    return folder_ && (!failure_ || folder_->is_promised(number_ + 1));
  }

  /// The newest one after this, if this process is a member.
  std::optional<Generation> await_generation() const {
    const std::chrono::milliseconds patience = first_.of_hosts ? kPatienceOverHosts : kPatience;
    const auto timeout =
        std::chrono::milliseconds(options_.init.timeout.value_or(std::chrono::minutes(2)));
    const auto begin = Clock::now();
    const auto waits = [&] {
      return Clock::now() < begin + (is_worth_waiting() ? timeout : patience);
    };
    for (PollPause pause; folder_ && waits(); pause.sleep()) {
      const auto newest = folder_->newest_after(number_);
      // One of its members has ended where the next is promised.
      const bool lives = newest && !folder_->is_promised(newest->number + 1);
      if (lives && rank_in(*newest) >= 0) return newest;
    }
    if (!failure_ && folder_)
      throw TimeoutError(
          "ElasticJob: no generation with this process has begun within " + seconds_text(timeout),
          "look at what the launcher and the other ranks printed last");
    return std::nullopt;
  }

  int rank_in(const Generation& generation) const {
    const auto& members = generation.members;
    const auto found = std::find(members.begin(), members.end(), worker_);
    return found == members.end() ? -1 : static_cast<int>(found - members.begin());
  }

  InitOptions init_options(const Generation& generation) {
    InitOptions options = options_.init;
    options.cancelled = [folder = folder_, number = generation.number] {
      return folder && (folder->has_after(number) || folder->is_promised(number + 1));
    };
    if (const auto& hosts = generation.of_hosts) {
      options.store = tcp_store({.host = hosts->master_addr, .port = hosts->master_port});
      options.generation = hosts->number;
      options.rank = hosts->first_rank + rank_in(generation);
      options.world_size = hosts->world_size;
      return options;
    }
    if (generation.number == 0) return options;
    if (!store_) store_ = store_of_launcher();
    options.store = store_;
    options.generation = generation.number;
    options.rank = rank_in(generation);
    options.world_size = static_cast<int>(generation.members.size());
    return options;
  }

  /// True: all ranks are done. False: the ranks meet anew, if there is a generation after this.
  bool run_generation(const Generation& generation, const std::function<void(World&)>& train) {
    failure_ = nullptr;
    if (folder_) folder_->join(worker_, generation.number);
    try {
      World world = init(init_options(generation));
      const bool may_begin = generation.number == 0 || generation.of_hosts;
      progress_.begins = false;
      progress_ = detail::share_state(parts_, progress_, world.group(), may_begin);
      if (progress_.begins) launch::seed_ranks(world, options_);
      keep_numbers();
      train(world);
      world.group().barrier();
      return true;
    } catch (const GenerationEnded&) {
    } catch (const MismatchError&) {
      throw;
    } catch (const CommError&) {
      failure_ = std::current_exception();
      leave();
    }
    restore_numbers();
    return false;
  }

  const StartOptions options_;
  const std::set<int> sizes_;
  const std::optional<GenerationFolder> folder_;
  const Generation first_;
  const int worker_;  ///< The RANK that it was started with.
  std::vector<detail::NamedPart> parts_;
  std::vector<Number> numbers_;
  detail::StateProgress progress_;
  int64_t number_ = 0;  ///< The generation.
  Store store_;
  std::exception_ptr failure_;  ///< That ended the generation.
};

ElasticJob::ElasticJob(int nprocs, const StartOptions& options) {
  launch::start_ranks(nprocs, options, "ElasticJob", true);
  impl_ = std::make_unique<Impl>(options);
}

ElasticJob::ElasticJob(const InitOptions& init, const std::set<int>& sizes)
    : impl_(std::make_unique<Impl>(StartOptions{.init = init}, sizes)) {}

ElasticJob::~ElasticJob() = default;

void ElasticJob::add(const std::string& name, torch::nn::Module& module) {
  add(name, Part{.get = [&module] { return state_dict(module); },
                 .set =
                     [&module, name](const StateDict& state) {
                       load_state_dict(module, state, "another rank's " + name);
                     }});
}

void ElasticJob::add(const std::string& name, torch::optim::Optimizer& optimizer) {
  add(name,
      Part{.get =
               [&optimizer] {
                 return StateDict{{"bytes", bytes_of(optimizer)}};
               },
           .set = [&optimizer](
                      const StateDict& state) { load_bytes(optimizer, state.at(0).second); }});
}

void ElasticJob::add(const std::string& name, Optimizer& optimizer) {
  add(name, Part{.get = [&optimizer] { return optimizer.state(); },
                 .set = [&optimizer](const StateDict& state) { optimizer.load_state(state); }});
}

void ElasticJob::add(const std::string& name, int64_t& number) {
  impl_->add_number(name, part_of(number));
}

void ElasticJob::add(const std::string& name, double& number) {
  impl_->add_number(name, part_of(number));
}

void ElasticJob::add(const std::string& name, Part part) {
  impl_->add(name, std::move(part));
}

void ElasticJob::run(const std::function<void(World&)>& train) {
  impl_->run(train);
}

void ElasticJob::commit() {
  impl_->commit();
}

void ElasticJob::leave() {
  impl_->leave();
}

int64_t ElasticJob::commits() const {
  return impl_->commits();
}

int64_t ElasticJob::generation() const {
  return impl_->generation();
}

bool ElasticJob::spans_hosts() const {
  return impl_->spans_hosts();
}

std::shared_ptr<const void>& ElasticJob::kept() {
  return impl_->kept;
}

}  // namespace lockstep
