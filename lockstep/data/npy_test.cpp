#include "lockstep/data/npy.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>

#include "lockstep/base/file.h"
#include "lockstep/data/zip.h"
#include "tests/support/test_files.h"

namespace lockstep {
namespace npy_test {

namespace fs = std::filesystem;
using namespace std::string_view_literals;
using test_files::complaint;
using test_files::npy;
using test_files::zip;
using testing::AllOf;
using testing::HasSubstr;

class Npy : public testing::Test {
 protected:
  fs::path write(std::string_view content, const std::string& name = "x.npy") {
    const fs::path path = folder_.path() / name;
    test_files::write(path, content);
    return path;
  }
  at::Tensor load(const std::string& header, std::string_view data, int version = 1) {
    return load_npy(write(npy(header, data, version)));
  }
  std::string complaint_about(std::string_view content) {
    const fs::path path = write(content);
    const std::string text = complaint<DataError>([&] { load_npy(path); });
    EXPECT_THAT(text, HasSubstr(path.string() + ", byte "));
    return text;
  }
  std::string archive_complaint(std::string_view content) {
    const fs::path path = write(content, "x.npz");
    const std::string text = complaint<DataError>([&] { load_npz(path); });
    EXPECT_THAT(text, HasSubstr(path.string()));
    return text;
  }
  TemporaryDirectory folder_;
};

std::string header_of(const std::string& descr, const std::string& shape, bool fortran = false) {
  return "{'descr': '" + descr + "', 'fortran_order': " + (fortran ? "True" : "False") +
         ", 'shape': " + shape + ", }";
}

const std::string kFourBytes = header_of("|u1", "(4,)");

TEST_F(Npy, ReadsEachVersionOfTheFormat) {
  for (const int version : {1, 2, 3}) {
    EXPECT_TRUE(load(header_of("<i2", "(2,)"), "\x01\x02\xff\xff"sv, version)
                    .equal(at::tensor({513, -1}, at::kShort)))
        << version;
  }
}

TEST_F(Npy, EitherByteOrder) {
  EXPECT_TRUE(
      load(header_of("<f4", "(2,)"), "\0\0\x80\x3f\0\0\0\xc0"sv).equal(at::tensor({1.f, -2.f})));
  EXPECT_TRUE(
      load(header_of(">f4", "(2,)"), "\x3f\x80\0\0\xc0\0\0\0"sv).equal(at::tensor({1.f, -2.f})));
  // Both halves of a complex number are swapped, each by itself.
  const at::Tensor complex = load(header_of(">c8", "(1,)"), "\x3f\x80\0\0\xc0\0\0\0"sv);
  EXPECT_EQ(complex.item<c10::complex<float>>(), (c10::complex<float>(1, -2)));
}

TEST_F(Npy, FortranOrderIsTurned) {
  // [[0, 1, 2], [3, 4, 5]] column by column.
  const at::Tensor tensor = load(header_of("|u1", "(2, 3)", true), "\0\3\1\4\2\5"sv);
  EXPECT_TRUE(tensor.equal(at::arange(6, at::kByte).reshape({2, 3})));
  EXPECT_TRUE(tensor.is_contiguous());
}

TEST_F(Npy, ScalarsAndEmptyArrays) {
  EXPECT_EQ(load(header_of("<i4", "()"), "\7\0\0\0"sv).item<int>(), 7);
  EXPECT_EQ(load(header_of("<i4", "(0, 3)"), ""sv).sizes(), (std::vector<int64_t>{0, 3}));
}

TEST_F(Npy, BooleansMustBeBooleans) {
  EXPECT_TRUE(load(header_of("|b1", "(2,)"), "\0\1"sv).equal(at::tensor({0, 1}).to(at::kBool)));
  EXPECT_THAT(complaint_about(npy(header_of("|b1", "(2,)"), "\0\2"sv)),
              HasSubstr("other than 0 or 1 for a boolean"));
}

TEST_F(Npy, ForeignFiles) {
  EXPECT_THAT(complaint_about(""), HasSubstr("byte 0: the file is empty"));
  EXPECT_THAT(complaint_about("PK\3\4 no array"), HasSubstr("byte 0: no npy file"));
  EXPECT_THAT(complaint_about(npy(kFourBytes, "abcd", 4)), HasSubstr("format version 4; expected"));
}

TEST_F(Npy, TruncatedAnywhere) {
  const std::string whole = npy(kFourBytes, "abcd");
  for (size_t size = 0; size < whole.size(); ++size) complaint_about(whole.substr(0, size));
  EXPECT_THAT(complaint_about(whole.substr(0, whole.size() - 1)),
              AllOf(HasSubstr("promises 4 elements of Byte"), HasSubstr("at most 3 bytes follow")));
  EXPECT_THAT(complaint_about(whole + "e"), HasSubstr("more bytes follow"));
}

TEST_F(Npy, UnusableHeaders) {
  const auto expect = [&](const std::string& header, const std::string& part) {
    EXPECT_THAT(complaint_about(npy(header, "abcd")), HasSubstr(part)) << header;
  };
  expect(header_of("|O", "(4,)"), "the dtype '|O'; expected a byte order");
  expect(header_of("<U4", "(4,)"), "the dtype '<U4'");
  for (const std::string header :
       {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '|u1', 'shape': (4,), }", "{'descr': '|u1', 'fortran_order': 1, 'shape': (4,)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-4,)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999999999999,)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (4",
        "{'descr': '|u1', 'fortran_order': False 'shape': (4,)}", "{'descr: '|u1'}",
        "{'color': 'red'}", "hello"}) {
    expect(header, "the npy header is");
  }
  expect(kFourBytes + " x", "the npy header is");
  expect(header_of("|u1", "(4294967296, 4294967296)"), "over 2^63");
  expect(header_of("|u1", "(1000000000,)"), "at most 4 bytes follow");
}

TEST_F(Npy, ArchivesStoredAndDeflated) {
  const std::string array = npy(header_of("<i2", "(2,)"), "\x01\x02\xff\xff"sv);
  const StateDict tensors = load_npz(write(
      zip({{"x.npy", array, false}, {"folder/y.npy", npy(kFourBytes, "abcd"), true}}), "x.npz"));
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[0].first, "x");
  EXPECT_TRUE(tensors[0].second.equal(at::tensor({513, -1}, at::kShort)));
  EXPECT_EQ(tensors[1].first, "folder/y");
  EXPECT_EQ(tensors[1].second[3].item<int>(), 'd');
  EXPECT_TRUE(load_npz(write(zip({}), "none.npz")).empty());
  const std::string empty = npy(header_of("<f4", "(0, 3)"), "");
  EXPECT_EQ(load_npz(write(zip({{"x.npy", empty, true}}), "empty.npz"))[0].second.numel(), 0);
}

TEST_F(Npy, ArchiveTruncatedAnywhere) {
  const std::string whole = zip({{"x.npy", npy(kFourBytes, "abcd"), true}});
  for (size_t size = 0; size < whole.size(); ++size) archive_complaint(whole.substr(0, size));
  EXPECT_THAT(archive_complaint(whole.substr(0, whole.size() - 1)),
              HasSubstr("the end of a zip archive was expected here"));
}

TEST_F(Npy, ArchiveDamage) {
  const std::string array = npy(kFourBytes, "abcd");
  for (const bool deflate : {false, true}) {
    std::string content = zip({{"x.npy", array, deflate}});
    const size_t data = content.find(deflate ? "PK\1\2" : "abcd") - (deflate ? 4 : 0);
    content[data] ^= 1;
    EXPECT_THAT(archive_complaint(content), HasSubstr("(x.npy in it)"));
  }
  std::string stored = zip({{"x.npy", array, false}});
  stored[stored.find("abcd")] = 'A';
  EXPECT_THAT(archive_complaint(stored), HasSubstr("CRC-32 is not the archive's"));
  EXPECT_THAT(archive_complaint(zip({{"x.npy", "no array here", true}})),
              HasSubstr("(x.npy in it), byte 0 of the decompressed content: no npy file"));

  const std::string whole = zip({{"x.npy", array, true}});
  const size_t directory = whole.find("PK\1\2");
  std::string encrypted = whole;
  encrypted[directory + 8] = 1;
  EXPECT_THAT(archive_complaint(encrypted), HasSubstr("is encrypted"));
  std::string method = whole;
  method[directory + 10] = 14;
  EXPECT_THAT(archive_complaint(method), HasSubstr("packed by method 14"));
  std::string signature = whole;
  signature[directory] = 'X';
  EXPECT_THAT(archive_complaint(signature), HasSubstr("expected entry 1 of 1"));
  std::string local = whole;
  local[0] = 'X';
  EXPECT_THAT(archive_complaint(local), HasSubstr("expected the header of 'x.npy'"));
}

}  // namespace npy_test
}  // namespace lockstep
