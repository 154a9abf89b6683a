#include "lockstep/comm/checks/flight_recorder.h"

#include <c10/util/ApproximateClock.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr int64_t kDefaultCalls = 2000, kMostCalls = 1'000'000;
constexpr int64_t kQuietNs = 1'000'000'000;  ///< After it TERM counts as the end of a stuck rank.
constexpr const char* kVersion = "2.10";     ///< Of PyTorch's format.

struct OfThread {
  uint64_t open_call = 0;     ///< Which this thread begins.
  uint64_t untaken_call = 0;  ///< The same, until a work has taken it.
  int64_t ticks_in_calls = 0;
};
thread_local OfThread of_thread;

/// `fr_trace` accepts no other names than PyTorch's. These differ from ours.
constexpr std::pair<Operation, std::string_view> kTraceNames[] = {
    {Operation::all_reduce_coalesced, "allreduce_coalesced"},
    {Operation::all_reduce_sparse, "all_reduce"},
    {Operation::all_gather_into_tensor, "_all_gather_base"},
    {Operation::all_gather_coalesced, "ALLGATHER_coalesced"},
    {Operation::reduce_scatter_tensor, "_reduce_scatter_base"},
    {Operation::all_to_all_single, "all_to_all"},
    {Operation::monitored_barrier, "barrier"},
    {Operation::recv_any, "recv"},
};

std::string_view trace_name(Operation operation) {
  for (const auto& [ours, name] : kTraceNames)
    if (ours == operation) return name;
  return operation_name(operation);
}

template <class Clock>
int64_t now_ns() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}
using Steady = std::chrono::steady_clock;

/// Half as costly as the steady clock, where the processor has a time-stamp counter.
int64_t ticks() {
  return static_cast<int64_t>(c10::getApproximateTime());
}

std::string file_of_environment() {
  for (const char* name : {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"})
    if (auto file = env_string(name)) return *file;
  return env_string("HOME").value_or("/tmp") + "/.cache/torch/comm_lib_trace_rank_";
}

size_t ring_size() {
  constexpr const char* kNames[] = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"};
  for (const char* name : kNames)
    if (const auto calls = env_int(name, 0, kMostCalls)) return static_cast<size_t>(*calls);
  return kDefaultCalls;
}

/// Where the program has not chosen what becomes of the signal.
void handle(int signal, void (*handler)(int)) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  if ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigfillset(&action.sa_mask);
  ::sigaction(signal, &action, nullptr);
}

/// Of the process that handles signals; a fork without exec is another one.
std::atomic<pid_t> owner{0};

}  // namespace

/// Writes Python's pickle format to a file without allocating.
class FlightRecorder::Pickle {
 public:
  explicit Pickle(int fd) : fd_(fd) {}
  void raw(std::string_view bytes) {
    for (const char byte : bytes) {
      if (used_ == buffer_.size()) flush();
      buffer_[used_++] = byte;
    }
  }
  void text(std::string_view value) {
    raw("X");
    number(value.size(), sizeof(uint32_t));
    raw(value);
  }
  void integer(int64_t value) {
    raw("\x8a\x08");
    number(static_cast<uint64_t>(value), sizeof value);
  }
  void boolean(bool value) { raw(value ? "\x88" : "\x89"); }
  void key(const char* name) { text(name); }
  void field(const char* name, int64_t value) {
    key(name);
    integer(value);
  }
  void field(const char* name, std::string_view value) {
    key(name);
    text(value);
  }
  void open_dict() { raw("}("); }
  void close_dict() { raw("u"); }
  void open_list() { raw("]("); }
  void close_list() { raw("e"); }
  bool flush() {
    for (size_t done = 0; good_ && done < used_;) {
      const ssize_t count = ::write(fd_, buffer_.data() + done, used_ - done);
      good_ = count >= 0 || errno == EINTR;
      if (count > 0) done += static_cast<size_t>(count);
    }
    used_ = 0;
    return good_;
  }

 private:
  void number(uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) {
      const char byte = static_cast<char>(value >> (8 * i));
      raw({&byte, 1});
    }
  }

  const int fd_;
  bool good_ = true;
  size_t used_ = 0;
  std::array<char, 4096> buffer_{};
};

FlightRecorder::FlightRecorder(size_t calls, std::string file)
    : file_(std::move(file)),
      start_ns_(now_ns<Steady>()),
      start_ticks_(ticks()),
      ring_(calls == 0 ? 0 : std::bit_ceil(calls)) {}

double FlightRecorder::ns_per_tick() const {
  return static_cast<double>(now_ns<Steady>() - start_ns_) /
         static_cast<double>(std::max<int64_t>(ticks() - start_ticks_, 1));
}

FlightRecorder& FlightRecorder::of_process() {
  // Never destroyed: works may end until the process does.
  static auto* const recorder = new FlightRecorder(ring_size(), file_of_environment());
  return *recorder;
}

size_t FlightRecorder::add_group(const std::string& name, const std::string& backend,
                                 const RankNames& ranks, int rank) {
  const std::lock_guard lock(mutex_);
  for (size_t i = first_group_; i < groups_.size(); ++i) {
    if (groups_[i].name != name) continue;
    first_group_ = groups_.size();
    first_call_ = last_ + 1;
    dumped_ = false;
  }
  std::vector<std::string> numbers;
  for (const int one : ranks) numbers.push_back(std::to_string(one));
  groups_.push_back({name, backend, "[" + join(numbers, ", ") + "]", rank});
  path_ = file_ + std::to_string(ranks.at(static_cast<size_t>(rank)));
  std::error_code refused;  // What then fails is the writing, which says so.
  if (!ring_.empty())
    std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), refused);
  if (this == &of_process() && !ring_.empty() && owner.exchange(::getpid()) == 0)
    for (const int signal : {SIGUSR2, SIGTERM}) handle(signal, on_signal);
  return groups_.size() - 1;
}

uint64_t FlightRecorder::begin(size_t group, const CallSignature& call) {
  if (ring_.empty()) return 0;
  const int64_t now = ticks();
  const std::lock_guard lock(mutex_);
  const uint64_t number = ++last_;
  Entry& entry = entry_of(number);
  entry.number.store(0, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);  // A handler passes by what is half written.
  entry.call = call;
  entry.group = group;
  entry.created = now;
  entry.ended.store(0, std::memory_order_relaxed);
  entry.failed.store(false, std::memory_order_relaxed);
  entry.number.store(number, std::memory_order_release);
  OfThread& mine = of_thread;
  return mine.open_call = mine.untaken_call = number;
}

void FlightRecorder::begun() {
  OfThread& mine = of_thread;
  mine.open_call = mine.untaken_call = 0;
}

uint64_t FlightRecorder::take() {
  return std::exchange(of_thread.untaken_call, 0);
}

std::chrono::nanoseconds FlightRecorder::time_in_calls() {
  const double ns = static_cast<double>(of_thread.ticks_in_calls) * of_process().ns_per_tick();
  return std::chrono::nanoseconds(static_cast<int64_t>(ns));
}

void FlightRecorder::end(uint64_t call, const std::exception_ptr& error) noexcept {
  if (call == 0) return;
  const int64_t now = ticks();
  Entry& entry = entry_of(call);
  if (entry.number.load(std::memory_order_relaxed) != call ||
      entry.ended.load(std::memory_order_relaxed) != 0)
    return;
  entry.failed.store(error != nullptr, std::memory_order_relaxed);
  entry.ended.store(now, std::memory_order_relaxed);
  OfThread& mine = of_thread;
  if (call == mine.open_call) mine.ticks_in_calls += now - entry.created;
  if (!error) return;
  try {
    std::rethrow_exception(error);
  } catch (const CommError& failed) {
    if (failed.failure().kind == Failure::Kind::unknown || dumped_.exchange(true)) return;
    std::unique_lock lock(mutex_);
    const std::string path = path_;
    const int reason = write_file() ? 0 : errno;
    lock.unlock();
    log_debug(reason == 0
                  ? "this rank's last calls are in " + path +
                        "; `lockstep debug` compares those of all ranks"
                  : "cannot write the last calls to " + path + ": " + std::strerror(reason));
  } catch (...) {  // Not between ranks.
  }
}

void FlightRecorder::on_signal(int number) {
  const int before = errno;
  FlightRecorder& recorder = of_process();
  if (::getpid() == owner) {
    // The interrupted thread may hold the lock.
    const std::unique_lock lock(recorder.mutex_, std::try_to_lock);
    const auto quiet = static_cast<double>(ticks() - recorder.entry_of(recorder.last_).created);
    if (number != SIGTERM || quiet * recorder.ns_per_tick() > kQuietNs) recorder.write_file();
  }
  if (number == SIGTERM) {
    ::signal(number, SIG_DFL);
    ::raise(number);  // When this handler returns.
  }
  errno = before;
}

bool FlightRecorder::dump() {
  const std::lock_guard lock(mutex_);
  return write_file();
}

bool FlightRecorder::write_file() const noexcept {
  const int fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return false;
  Pickle out(fd);
  write(out);
  const bool good = out.flush();
  ::close(fd);
  return good;
}

void FlightRecorder::write(Pickle& out) const {
  out.raw({"\x80\x02", 2});
  out.open_dict();
  out.field("version", kVersion);
  out.key("pg_config");
  out.open_dict();
  for (size_t i = first_group_; i < groups_.size(); ++i) {
    const Group& group = groups_[i];
    out.key(group.name.c_str());
    out.open_dict();
    out.field("name", group.name);
    out.field("desc", group.backend);
    out.field("ranks", group.ranks);
    out.close_dict();
  }
  out.close_dict();
  out.key("entries");
  out.open_list();
  for (uint64_t number = last_ - std::min<uint64_t>(last_, ring_.size()) + 1; number <= last_;
       ++number) {
    const Entry& entry = entry_of(number);
    if (number >= first_call_ && entry.number == number && entry.group >= first_group_)
      write(out, entry);
  }
  out.close_list();
  out.close_dict();
  out.raw(".");
}

void FlightRecorder::write(Pickle& out, const Entry& entry) const {
  const auto ns_of = [end = now_ns<std::chrono::system_clock>(), last = ticks(),
                      scale = ns_per_tick()](int64_t when) {
    return end - static_cast<int64_t>(static_cast<double>(last - when) * scale);
  };
  const int64_t ended = entry.ended;
  const CallSignature& call = entry.call;
  const Group& group = groups_[entry.group];
  const bool is_message = call.is_message();
  // `fr_trace` knows no other libraries.
  std::array<char, 96> name{};
  const char* arrow = call.operation == Operation::send ? "->" : "<-";
  int length =
      std::snprintf(name.data(), name.size(), "%s:%s", group.backend == "nccl" ? "nccl" : "gloo",
                    trace_name(call.operation).data());
  if (is_message)
    length += std::snprintf(name.data() + length, name.size() - static_cast<size_t>(length),
                            " %d%s%d", group.rank, arrow, call.root);
  out.open_dict();
  out.field("record_id", static_cast<int64_t>(entry.number - first_call_));
  out.key("process_group");
  out.text(group.name);
  out.text(group.backend);
  out.raw("\x86");
  out.field("collective_seq_id", static_cast<int64_t>(call.sequence));
  // `fr_trace` takes a collective and a message of one number for one call: messages count down.
  out.field("p2p_seq_id", is_message ? -static_cast<int64_t>(entry.number) : 0);
  out.key("is_p2p");
  out.boolean(is_message);
  out.field("profiling_name", std::string_view(name.data(), static_cast<size_t>(length)));
  out.field("reduction", call.reduction);  // Ours, and the next.
  out.field("root", call.root);
  out.field("time_created_ns", ns_of(entry.created));
  out.key("time_discovered_completed_ns");
  ended > 0 ? out.integer(ns_of(ended)) : out.raw("N");
  out.field("state", ended > 0 && !entry.failed ? "completed" : "started");
  for (const bool is_input : {true, false}) {
    const auto& tensors = is_input || call.outputs.empty() ? call.inputs : call.outputs;
    out.key(is_input ? "input_sizes" : "output_sizes");
    out.open_list();
    for (const TensorSignature& tensor : tensors) {
      out.open_list();
      for (const int64_t size : tensor.shape) out.integer(size);
      out.close_list();
    }
    out.close_list();
    out.key(is_input ? "input_dtypes" : "output_dtypes");
    out.open_list();
    for (const TensorSignature& tensor : tensors) out.text(c10::toString(tensor.dtype));
    out.close_list();
  }
  out.close_dict();
}

}  // namespace lockstep
