#include "lockstep/comm/checks/converted_work.h"

#include <utility>

#include "lockstep/comm/checks/translated_work.h"

namespace lockstep {
namespace {

class ConvertedWork final : public TranslatedWork {
 public:
  ConvertedWork(c10::intrusive_ptr<c10d::Work> inner, ErrorConversion convert)
      : TranslatedWork(-1, std::move(inner)), convert_(std::move(convert)) {}

 private:
  std::exception_ptr translate(const std::exception_ptr& error,
                               std::chrono::milliseconds) const override {
    return convert_(error);
  }
  ErrorConversion future_conversion() const override { return convert_; }

  const ErrorConversion convert_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> make_converted_work(c10::intrusive_ptr<c10d::Work> inner,
                                                   ErrorConversion convert) {
  if (!inner) return inner;
  return c10::make_intrusive<ConvertedWork>(std::move(inner), std::move(convert));
}

}  // namespace lockstep
