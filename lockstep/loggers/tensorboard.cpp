#include <ATen/ops/histc.h>
#include <fcntl.h>
#include <isa-l/crc.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <string_view>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/loggers/json_rows.h"

namespace lockstep {
namespace {

static_assert(std::endian::native == std::endian::little, "event files are little-endian");

template <class T>
std::string raw_bytes(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

/// A protobuf message, field by field. Numbers are those of TensorFlow's event.proto,
/// summary.proto and tensor.proto.
class Message {
 public:
  Message& number(int field, uint64_t value) {
    key(field, 0);
    varint(value);
    return *this;
  }
  Message& real(int field, double value) {
    key(field, 1);
    text_ += raw_bytes(value);
    return *this;
  }
  Message& real32(int field, float value) {
    key(field, 5);
    text_ += raw_bytes(value);
    return *this;
  }
  Message& text(int field, std::string_view value) {
    key(field, 2);
    varint(value.size());
    text_ += value;
    return *this;
  }
  Message& message(int field, const Message& value) { return text(field, value.text_); }
  void append(const Message& fields) { text_ += fields.text_; }
  const std::string& bytes() const { return text_; }

 private:
  void key(int field, int kind) { varint(static_cast<uint64_t>(field << 3 | kind)); }
  void varint(uint64_t value) {
    for (; value > 127; value >>= 7) text_ += static_cast<char>(value | 128);
    text_ += static_cast<char>(value);
  }
  std::string text_;
};

/// TensorFlow's: a checksum of data that holds checksums must not be one of them.
uint32_t masked_crc32c(const std::string& bytes) {
  // ISA-L reads it only. It leaves both inversions to the caller.
  auto* data = reinterpret_cast<unsigned char*>(const_cast<char*>(bytes.data()));
  const uint32_t crc = ~::crc32_iscsi(data, static_cast<int>(bytes.size()), ~0U);
  return std::rotr(crc, 15) + 0xa282ead8U;
}

std::string record_of(const Message& event) {
  const std::string length = raw_bytes(static_cast<uint64_t>(event.bytes().size()));
  return length + raw_bytes(masked_crc32c(length)) + event.bytes() +
         raw_bytes(masked_crc32c(event.bytes()));
}

/// HistogramProto.
Message histogram_of(const at::Tensor& values) {
  constexpr int64_t kParts = 64;
  const at::Tensor all = values.detach().reshape(-1).to(at::kCPU, at::kDouble);
  const at::Tensor finite = all.masked_select(all.isfinite());
  const double least = finite.numel() > 0 ? finite.min().item<double>() : 0;
  double most = finite.numel() > 0 ? finite.max().item<double>() : 0;
  Message histogram;
  histogram.real(1, least).real(2, most).real(3, static_cast<double>(finite.numel()));
  histogram.real(4, finite.sum().item<double>()).real(5, finite.square().sum().item<double>());
  if (most <= least) most = least + std::max(std::abs(least), 1.0) * 1e-9;
  const at::Tensor counts = at::histc(finite, kParts, least, most);
  std::string limits;
  for (int64_t i = 1; i <= kParts; ++i)
    limits += raw_bytes(least + (most - least) * static_cast<double>(i) / kParts);
  std::string buckets;
  for (int64_t i = 0; i < kParts; ++i) buckets += raw_bytes(counts[i].item<double>());
  return histogram.text(6, limits).text(7, buckets);
}

/// A value of Summary for the text plugin.
Message text_value(const std::string& tag, const std::string& text) {
  constexpr uint64_t kString = 7;  ///< DT_STRING
  Message value;
  value.text(1, tag);
  value.message(8, Message()
                       .number(1, kString)
                       .message(2, Message().message(2, Message().number(1, 1)))
                       .text(8, detail::valid_utf8(text)));
  return value.message(9, Message().message(1, Message().text(1, "text")));
}

class TensorBoard : public Logger {
 public:
  explicit TensorBoard(std::filesystem::path folder) : folder_(std::move(folder)) {}

  void begin(int64_t step, int64_t epochs) override {
    std::filesystem::create_directories(folder_);
    open();
    write(0, Message().text(3, "brain.Event:2"));
    constexpr uint64_t kStart = 1;  ///< SessionLog::START, which takes back what is at later steps.
    write(step > 0 ? step + 1 : 0, Message().message(7, Message().number(1, kStart)));
  }

  void log(int64_t step, const MetricValues& values, const std::string& split) override {
    Message summary;
    for (const auto& [name, value] : values) {
      if (std::isnan(value)) continue;
      const std::string tag = detail::valid_utf8(split.empty() ? name : split + "/" + name);
      summary.message(1, Message().text(1, tag).real32(2, static_cast<float>(value)));
    }
    write_summary(step, summary);
  }

  void log_hyperparameters(const std::map<std::string, std::string>& values) override {
    std::string table = "| name | value |\n|---|---|\n";
    for (const auto& [name, value] : values) table += "| " + name + " | " + value + " |\n";
    write_summary(0, Message().message(1, text_value("hyperparameters", table)));
  }

  void log_histogram(int64_t step, const std::string& name, const at::Tensor& values) override {
    Message value;
    value.text(1, detail::valid_utf8(name)).message(5, histogram_of(values));
    write_summary(step, Message().message(1, value));
  }

  void close(const std::string& failure) noexcept override {
    if (failure.empty()) return;
    try {
      write_summary(last_step_, Message().message(1, text_value("failure", failure)));
    } catch (const std::exception& error) {
      log_warning(error.what());
    }
  }

 private:
  void open() {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    char host[256] = "host";
    ::gethostname(host, sizeof host - 1);
    // TensorBoard reads files in the order of their names.
    const std::string name =
        "events.out.tfevents." +
        std::to_string(std::chrono::duration_cast<std::chrono::seconds>(now).count()) + "." + host +
        "." + std::to_string(::getpid()) + "." + std::to_string(files_++);
    path_ = folder_ / name;
    fd_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    if (!fd_) {
      throw SystemError("cannot write event file " + path_.string(), errno,
                        "name a folder that you may write to");
    }
  }

  void write_summary(int64_t step, const Message& summary) {
    if (!fd_) Logger::begin();
    write(last_step_ = step, Message().message(5, summary));
  }

  /// Event, from its second field on.
  void write(int64_t step, const Message& rest) {
    const double now =
        std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    Message event;
    event.real(1, now).number(2, static_cast<uint64_t>(step));
    event.append(rest);
    const std::string record = record_of(event);
    write_all(fd_.get(), record.data(), record.size(), path_);
  }

  std::filesystem::path folder_;
  std::filesystem::path path_;
  UniqueFd fd_;
  int files_ = 0;
  int64_t last_step_ = 0;
};

}  // namespace

std::shared_ptr<Logger> tensorboard_logger(std::filesystem::path folder) {
  return std::make_shared<TensorBoard>(std::move(folder));
}

}  // namespace lockstep
