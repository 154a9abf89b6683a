#include "lockstep/data/image_folder.h"

#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <zlib.h>

#include <cstdio>  // jpeglib.h needs it

#include <jpeglib.h>

#include "lockstep/base/file.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/rgb_image.h"
#include "tests/support/test_files.h"

namespace lockstep {
namespace image_folder_test {

namespace fs = std::filesystem;
using test_files::complaint;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::string big_endian(uint32_t value) {
  std::string bytes;
  for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(value >> shift);
  return bytes;
}

/// A PNG of these rows, each without its filter byte. `color` and `depth` as its header has them.
std::string png(uint32_t width, uint32_t height, std::string_view rows, int color = 2,
                int depth = 8, const std::string& palette = {}) {
  std::string packed;
  const size_t row = rows.size() / height;
  for (uint32_t y = 0; y < height; ++y) packed += '\0' + std::string(rows.substr(y * row, row));
  std::string file("\x89PNG\r\n\x1A\n");
  const auto chunk = [&](const std::string& type, const std::string& content) {
    const std::string body = type + content;
    const auto* bytes = reinterpret_cast<const Bytef*>(body.data());
    file += big_endian(static_cast<uint32_t>(content.size())) + body +
            big_endian(static_cast<uint32_t>(crc32_z(0, bytes, body.size())));
  };
  chunk("IHDR", big_endian(width) + big_endian(height) + static_cast<char>(depth) +
                    static_cast<char>(color) + std::string(3, '\0'));
  if (!palette.empty()) chunk("PLTE", palette);
  chunk("IDAT", test_files::deflated(packed, 15));
  chunk("IEND", "");
  return file;
}

std::string pattern(size_t size, int seed = 0) {
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>((i * 37 + i / 7 + seed) % 256);
  return bytes;
}

std::vector<uint8_t> bytes_of(std::initializer_list<int> values) {
  return {values.begin(), values.end()};
}

std::string jpeg(int width, int height, int channels, J_COLOR_SPACE space, std::string pixels) {
  jpeg_compress_struct encoder{};
  jpeg_error_mgr errors;
  encoder.err = jpeg_std_error(&errors);
  jpeg_create_compress(&encoder);
  unsigned char* memory = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&encoder, &memory, &size);
  encoder.image_width = width;
  encoder.image_height = height;
  encoder.input_components = channels;
  encoder.in_color_space = space;
  jpeg_set_defaults(&encoder);
  jpeg_set_quality(&encoder, 100, TRUE);
  jpeg_start_compress(&encoder, TRUE);
  for (int y = 0; y < height; ++y) {
    JSAMPROW row = reinterpret_cast<JSAMPROW>(pixels.data() + y * width * channels);
    jpeg_write_scanlines(&encoder, &row, 1);
  }
  jpeg_finish_compress(&encoder);
  std::string file(reinterpret_cast<const char*>(memory), size);
  jpeg_destroy_compress(&encoder);
  std::free(memory);
  return file;
}

TEST(Jpeg, ColoursGreyAndInksBecomeRgb) {
  // Even areas survive the compression at best quality but for roundings.
  const auto first_pixel = [](const std::string& file) {
    const at::Tensor image = decode_jpeg(file, "a.jpg");
    EXPECT_EQ(image.sizes(), at::IntArrayRef({16, 24, 3}));
    const auto* pixels = image.const_data_ptr<uint8_t>();
    return std::vector<int>(pixels, pixels + 3);
  };
  const auto area = [](std::initializer_list<int> color) {
    std::string bytes;
    for (int i = 0; i < 24 * 16; ++i) {
      for (const int value : color) bytes += static_cast<char>(value);
    }
    return bytes;
  };
  const auto near = [](int value) {
    return testing::AllOf(testing::Ge(value - 2), testing::Le(value + 2));
  };
  EXPECT_THAT(first_pixel(jpeg(24, 16, 3, JCS_RGB, area({200, 30, 90}))),
              ElementsAre(near(200), near(30), near(90)));
  EXPECT_THAT(first_pixel(jpeg(24, 16, 1, JCS_GRAYSCALE, area({77}))),
              ElementsAre(near(77), near(77), near(77)));
  // As stored: 255 - ink. Light is stored * stored black / 255.
  EXPECT_THAT(first_pixel(jpeg(24, 16, 4, JCS_CMYK, area({255, 128, 0, 200}))),
              ElementsAre(near(200), near(100), near(0)));
}

TEST(Jpeg, DamagedOnesAreNamed) {
  const std::string whole = jpeg(24, 16, 3, JCS_RGB, pattern(24 * 16 * 3));
  EXPECT_THAT(
      complaint<DataError>([&] { decode_jpeg(whole.substr(0, whole.size() / 2), "a.jpg"); }),
      AllOf(HasSubstr("a.jpg: the JPEG is damaged: "), HasSubstr("remature end")));
  EXPECT_THAT(complaint<DataError>([&] { decode_jpeg(whole.substr(0, 20), "a.jpg"); }),
              HasSubstr("damaged"));
}

TEST(Png, EveryKindOfPixelBecomesRgb) {
  const auto pixels = [](const std::string& file) {
    const at::Tensor image = decode_png(file, "a.png");
    const auto* first = image.const_data_ptr<uint8_t>();
    return std::vector<uint8_t>(first, first + image.numel());
  };
  const std::string colors = pattern(4 * 2 * 3);
  EXPECT_EQ(pixels(png(4, 2, colors)), std::vector<uint8_t>(colors.begin(), colors.end()));
  EXPECT_EQ(pixels(png(2, 1, "\x10\x80", 0)), bytes_of({16, 16, 16, 128, 128, 128}));
  EXPECT_EQ(pixels(png(2, 1, "\x01\x02\x03\x40\x05\x06\x07\xFF", 6)), bytes_of({1, 2, 3, 5, 6, 7}));
  EXPECT_EQ(pixels(png(2, 1, "\x01\x40\x05\xFF", 4)), bytes_of({1, 1, 1, 5, 5, 5}));
  EXPECT_EQ(pixels(png(1, 1, std::string("\x12\xFF\x34\x00\x56\x80", 6), 2, 16)),
            bytes_of({0x12, 0x34, 0x56}));
  EXPECT_EQ(pixels(png(2, 1, "\x10", 3, 4, "\x01\x02\x03\x09\x08\x07")),
            bytes_of({9, 8, 7, 1, 2, 3}));
  EXPECT_EQ(pixels(png(3, 1, "\xA0", 0, 1)), bytes_of({255, 255, 255, 0, 0, 0, 255, 255, 255}));
}

TEST(Png, DamagedOnesAreNamed) {
  const std::string whole = png(20, 20, pattern(20 * 20 * 3));
  EXPECT_THAT(complaint<DataError>([&] { decode_png(whole.substr(0, whole.size() / 2), "a.png"); }),
              AllOf(HasSubstr("a.png: the PNG is damaged: "), HasSubstr("cut short")));
  std::string flipped = whole;
  flipped[18] ^= 1;
  EXPECT_THAT(complaint<DataError>([&] { decode_png(flipped, "a.png"); }), HasSubstr("damaged"));
  EXPECT_THAT(complaint<DataError>([&] { decode_png(png(1 << 20, 1 << 20, "", 2), "a.png"); }),
              HasSubstr("a.png"));
}

class ImageFolder : public ::testing::Test {
 protected:
  void image(const std::string& name, uint32_t width = 12, uint32_t height = 8, int seed = 0) {
    fs::create_directories((folder_.path() / name).parent_path());
    test_files::write(folder_.path() / name, png(width, height, pattern(width * height * 3, seed)));
  }
  std::vector<std::string> listed(const std::string& below = "") {
    std::vector<std::string> names;
    for (const auto& [path, label] : list_images(folder_.path() / below).images) {
      names.push_back(fs::relative(path, folder_.path()).string() + " " + std::to_string(label));
    }
    return names;
  }
  TemporaryDirectory folder_;
};

TEST_F(ImageFolder, ClassesAndImagesAreInTorchvisionsOrder) {
  for (const char* name : {"cat/b.png", "cat/A.PNG", "cat/more/a.png", "dog/2.png", "dog/10.png"}) {
    image(name);
  }
  test_files::write(folder_.path() / "cat" / "notes.txt", "no image");
  test_files::write(folder_.path() / "cat" / "c.webp", "left out");
  EXPECT_THAT(listed(), ElementsAre("cat/A.PNG 0", "cat/b.png 0", "cat/more/a.png 0",
                                    "dog/10.png 1", "dog/2.png 1"));
  EXPECT_THAT(list_images(folder_.path()).classes, ElementsAre("cat", "dog"));
}

TEST_F(ImageFolder, ScalesTheShorterSideAndCutsTheMiddleOut) {
  image("a/x.png", 21, 10);
  const auto source = image_source(list_images(folder_.path()), {.resize = 8, .crop = 5});
  const TensorDataset all = read_all(*source);
  ASSERT_EQ(all.data.sizes(), at::IntArrayRef({1, 3, 5, 5}));
  const std::string rows = pattern(21 * 10 * 3);
  const at::Tensor whole =
      at::from_blob(const_cast<char*>(rows.data()), {10, 21, 3}, at::TensorOptions(at::kByte))
          .permute({2, 0, 1})
          .unsqueeze(0)
          .contiguous();
  const at::Tensor scaled = at::_upsample_bilinear2d_aa(whole, {8, 16}, false);
  // (8 - 5) / 2 = 1.5 and (16 - 5) / 2 = 5.5: to the even neighbours, as Python rounds.
  EXPECT_TRUE(at::equal(all.data[0], scaled[0].narrow(1, 2, 5).narrow(2, 6, 5)));
  EXPECT_EQ(all.num_classes, 1);
}

TEST_F(ImageFolder, AnImageOfTheRightSizeIsNotChanged) {
  image("a/x.png", 7, 5, 3);
  const TensorDataset all =
      read_all(*image_source(list_images(folder_.path()), {.resize = 5, .crop = 5}));
  const std::string rows = pattern(7 * 5 * 3, 3);
  EXPECT_EQ(all.data[0][2][4][0].item<uint8_t>(), static_cast<uint8_t>(rows[3 * (4 * 7 + 1) + 2]));
}

TEST_F(ImageFolder, PartsAreThoseOfTheFolderOrTheLastOfEachClass) {
  for (int i = 0; i < 5; ++i) {
    image("cat/" + std::to_string(i) + ".png");
    image("dog/" + std::to_string(i) + ".png");
  }
  const std::string name = "folder:" + folder_.path().string();
  DatasetOptions options{.test_fraction = 0.4, .image_size = 7};
  DatasetSources sources = open_dataset(name, options);
  EXPECT_EQ(sources.train->size(), 6);
  EXPECT_EQ(sources.test->size(), 4);
  EXPECT_EQ(sources.train->name(), name);
  EXPECT_THAT(read_all(*sources.test).targets.sum().item<int64_t>(), 2);
  for (const char* part : {"train", "val", "test"}) image(std::string(part) + "/cat/a.png");
  image("train/cat/b.png");
  EXPECT_THAT(complaint<UsageError>([&] { open_dataset(name, options); }),
              HasSubstr("has a test part"));
  options.test_fraction.reset();
  sources = open_dataset(name, options);
  EXPECT_EQ(sources.train->size(), 2);
  EXPECT_EQ(sources.test->size(), 1);
  image("val/dog/a.png");
  EXPECT_THAT(complaint<DataError>([&] { open_dataset(name, options); }),
              HasSubstr("val has the classes cat, dog, but"));
  fs::remove_all(folder_.path() / "val");
  image("test/cat/b.png");
  EXPECT_EQ(open_dataset(name, options).test->size(), 2) << "test is taken where there is no val";
}

TEST_F(ImageFolder, TheTrainingPartMayBeLargerForRandomCrops) {
  for (const char* name : {"a/1.png", "a/2.png"}) image(name, 30, 20);
  const DatasetSplits splits =
      load_dataset("folder:" + folder_.path().string(), {.image_size = 14, .train_image_size = 16});
  EXPECT_EQ(splits.train.data.sizes(), at::IntArrayRef({1, 3, 16, 16}));
  EXPECT_EQ(splits.test.data.sizes(), at::IntArrayRef({1, 3, 14, 14}));
  EXPECT_THAT(splits.test.classes, ElementsAre("a"));
}

TEST_F(ImageFolder, WorkersReadTheSameAsTheLoopItself) {
  for (int i = 0; i < 6; ++i) image("a/" + std::to_string(i) + ".png", 10, 10, i);
  const auto read = [&](int workers) {
    DataLoader loader(image_source(list_images(folder_.path()), {.resize = 8, .crop = 8}),
                      DistributedSampler({.dataset_size = 6}), {to_float()},
                      {.batch_size = 4, .num_workers = workers});
    std::vector<at::Tensor> all;
    for (const auto& batch : loader.epoch(0)) all.push_back(batch.data.clone());
    return all;
  };
  const auto one = read(0), several = read(2);
  ASSERT_EQ(one.size(), 2);
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(one[i], several[i]));
}

TEST_F(ImageFolder, WhatIsWrongIsNamed) {
  const auto message = [&] {
    return complaint<DataError>(
        [&] { load_dataset("folder:" + folder_.path().string(), {.image_size = 7}); });
  };
  EXPECT_THAT(complaint<DataError>([] { load_dataset("folder:/no/such"); }),
              HasSubstr("/no/such: there is no such folder"));
  EXPECT_THAT(message(), HasSubstr("has no folders; expected one for each class"));
  image("a/1.png");
  EXPECT_THAT(message(), HasSubstr("one image a class only"));
  image("a/2.png");
  fs::create_directories(folder_.path() / "b");
  EXPECT_THAT(message(), HasSubstr("b: this class has no image"));
  test_files::write(folder_.path() / "b" / "x.png", "GIF89a");
  image("b/y.png");
  EXPECT_THAT(message(), HasSubstr("x.png, byte 0: this is neither JPEG nor PNG"));
  EXPECT_THAT(complaint<UsageError>(
                  [&] { image_source(list_images(folder_.path()), {.resize = 8, .crop = 9}); }),
              HasSubstr("cannot have the middle 9 cut out"));
}

TEST_F(ImageFolder, LinksThatLeadBackAreRefusedAndThoseThatLeadNowhereAreTold) {
  for (const char* name : {"a/1.png", "b/1.png", "c/more/1.png"}) image(name);
  fs::create_directory_symlink("../c", folder_.path() / "a" / "others");
  fs::create_symlink("no-such.png", folder_.path() / "a" / "gone.png");
  fs::create_symlink("self.png", folder_.path() / "b" / "self.png");
  fs::create_directory_symlink("no-such", folder_.path() / "d");
  testing::internal::CaptureStderr();
  EXPECT_THAT(listed(), ElementsAre("a/1.png 0", "c/more/1.png 0", "b/1.png 1", "c/more/1.png 2"));
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("3 links"));
  const auto refused = [&](const char* target, const fs::path& link) {
    fs::create_directory_symlink(target, folder_.path() / link);
    EXPECT_THAT(complaint<DataError>([&] { listed(); }),
                HasSubstr(link.filename().string() + " is a link"));
    fs::remove(folder_.path() / link);
  };
  refused("..", "b/up");
  refused(".", "b/here");
  refused(".", "e");
  refused("../../a", "c/more/back");  // From a/others/more, by two links.
  image("alone/1.png");
  fs::rename(folder_.path() / "alone" / "1.png", folder_.path() / "b" / "2.png");
  fs::create_symlink("no-such.png", folder_.path() / "alone" / "gone.png");
  EXPECT_THAT(complaint<DataError>([&] { listed(); }),
              AllOf(HasSubstr("alone: this class has no image"), HasSubstr("gone.png")));
}

TEST_F(ImageFolder, ImagesThatCannotBeReadAreNamedAtTheStartOrSkipped) {
  for (const char* name : {"a/1.png", "a/2.png", "b/3.png", "b/5.png"}) image(name);
  const auto put = [&](const char* name, const std::string& content) {
    test_files::write(folder_.path() / name, content);
  };
  const std::string whole = png(12, 8, pattern(12 * 8 * 3));
  const std::string photo = jpeg(12, 8, 3, JCS_RGB, pattern(12 * 8 * 3));
  put("a/4.png", whole + "more");  // Bytes behind the image do no harm.
  put("a/5.jpg", photo);
  put("b/6.jpg", photo + "more");
  EXPECT_NO_THROW(check_images(list_images(folder_.path())));
  put("a/2.png", "");
  put("b/3.png", whole.substr(0, whole.size() - 20));
  put("b/5.png", "GIF89a");
  put("b/6.jpg", photo.substr(0, photo.size() / 2));
  const ImageList list = list_images(folder_.path());  // a: 1 2 4 5, b: 3 5 6
  EXPECT_THAT(complaint<DataError>([&] { check_images(list); }),
              AllOf(HasSubstr("4 images"), HasSubstr("a/2.png"), HasSubstr("b/3.png"),
                    HasSubstr("b/5.png"), HasSubstr("b/6.jpg")));
  EXPECT_NO_THROW(check_images(list, 0, 8));
  EXPECT_THAT(complaint<DataError>([&] { check_images(list, 1, 3); }),
              AllOf(HasSubstr("2 images"), HasSubstr("a/2.png"), HasSubstr("b/3.png")));
  const std::string name = "folder:" + folder_.path().string();
  EXPECT_THAT(complaint<DataError>([&] { open_dataset(name, {.image_size = 7}); }),
              HasSubstr("a/2.png"));
  testing::internal::CaptureStderr();
  ImageFolderOptions options{.resize = 8, .crop = 7};
  EXPECT_THROW(read_all(*image_source(list, options)), DataError);
  options.on_bad_image = OnBadImage::skip;
  const auto source = image_source(list, options);
  const TensorDataset all = read_all(*source);
  read_all(*source->clone());
  EXPECT_TRUE(at::equal(all.data[1], all.data[2]));
  for (int64_t i = 4; i < 7; ++i) EXPECT_TRUE(at::equal(all.data[i], all.data[0]));
  EXPECT_TRUE(at::equal(all.targets, at::zeros({7}, at::kLong)))
      << "class of the image that is there";
  const std::string said = testing::internal::GetCapturedStderr();
  for (const char* bad : {"a/2.png", "b/3.png", "b/5.png", "b/6.jpg"}) {
    EXPECT_THAT(said, HasSubstr(bad));
    EXPECT_EQ(said.find(bad), said.rfind(bad)) << "told once: " << bad;
  }
  fs::remove_all(folder_.path() / "a");
  EXPECT_THROW(read_all(*image_source(list_images(folder_.path()), options)), DataError)
      << "no image is left";
}

TEST(RgbImage, AbsurdSizesAreRefused) {
  EXPECT_THAT(complaint<DataError>([&] { empty_image(1 << 30, 1 << 30, "a.png"); }),
              HasSubstr("a.png: an image of 1073741824 x 1073741824 pixels"));
  EXPECT_THAT(complaint<DataError>([&] { empty_image(0, 5, "a.png"); }), HasSubstr("5 x 0"));
}

}  // namespace image_folder_test
}  // namespace lockstep
