// RotateKeys and RotateQueries: RoPE at attention.
#include <cmath>
#include <complex>

#include "tests/worker/backend/backend_test_base.h"
#include "worker/cache/kv_element.h"

namespace heavywater {
namespace {

constexpr int kNumPlaces = 50;

double AngleOf(int head_dim, int pair, int place) {
  return place * std::pow(10000.0, -2.0 * pair / head_dim);
}

std::vector<float> Angles(int head_dim) {
  std::vector<float> angles;
  for (int place = 0; place < kNumPlaces; ++place) {
    for (int i = 0; i < head_dim / 2; ++i) {
      angles.push_back(static_cast<float>(std::cos(AngleOf(head_dim, i, place))));
    }
    for (int i = 0; i < head_dim / 2; ++i) {
      angles.push_back(static_cast<float>(std::sin(AngleOf(head_dim, i, place))));
    }
  }
  return angles;
}

// Each pair a complex number, turned.
std::vector<float> Turned(std::vector<float> row, int place) {
  const int head_dim = static_cast<int>(row.size());
  for (int i = 0; i < head_dim / 2; ++i) {
    const std::complex<double> turned = std::complex<double>(row[i], row[head_dim / 2 + i]) *
                                        std::polar(1.0, AngleOf(head_dim, i, place));
    row[i] = static_cast<float>(turned.real());
    row[head_dim / 2 + i] = static_cast<float>(turned.imag());
  }
  return row;
}

std::vector<float> Loaded(const std::vector<std::byte>& row, KvDtype dtype) {
  std::vector<float> values(row.size() / ElementBytes(dtype));
  LoadKvRow(dtype, row.data(), values);
  return values;
}

// The last bit of what is stored may differ.
void ExpectNearStored(const std::vector<float>& got, const std::vector<float>& want,
                      KvDtype dtype) {
  const double unit = dtype == KvDtype::kFloat32   ? 0x1p-21
                      : dtype == KvDtype::kFloat16 ? 0x1p-10
                                                   : 0x1p-7;
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], unit * (1 + std::abs(want[i]))) << "element " << i;
  }
}

TEST_P(BackendTest, RotateKeysTurnsEachSlotToItsPlaceAndLeavesTheSlotsAsTheyAre) {
  std::mt19937 rng(3);
  for (const KvDtype dtype : kKvDtypes) {
    for (const int head_dim : {64, 72, 128}) {
      for (const int num_sets : {1, 3}) {
        KvShape shape;
        shape.num_query_heads = shape.num_kv_heads = 3;
        shape.head_dim = head_dim;
        shape.dtype = dtype;
        LayerImage image = DenseLayer(rng, shape, num_sets, 45);
        image.used = 41;
        const DeviceLayer layer(backend(), image);
        std::vector<int32_t> places;
        for (int i = 0; i < num_sets * 41; ++i) {
          places.push_back(static_cast<int32_t>(rng() % kNumPlaces));
        }
        const std::vector<std::byte> marked(image.keys.size(), std::byte{0x41});
        const DeviceBuffer to = Upload(backend(), marked);
        const DeviceBuffer angles = Upload(backend(), Angles(head_dim));
        Stream stream;
        const absl::Status status = backend().RotateKeys(shape,
                                                         {.layer = layer.view(),
                                                          .places = places,
                                                          .angles = angles.As<float>(),
                                                          .to = to.As<std::byte>()},
                                                         stream);
        ASSERT_TRUE(status.ok()) << status;
        const std::vector<std::byte> turned = Download<std::byte>(backend(), to);
        for (int head = 0; head < 3; ++head) {
          const int set = num_sets == 1 ? 0 : head;
          for (int slot = 0; slot < 41; ++slot) {
            const auto row = Loaded(StoredRow(image.keys, shape, 45, head, slot), dtype);
            ExpectNearStored(Loaded(StoredRow(turned, shape, 45, head, slot), dtype),
                             Turned(row, places[set * 41 + slot]), dtype);
          }
          EXPECT_EQ(StoredRow(turned, shape, 45, head, 41), StoredRow(marked, shape, 45, head, 41));
        }
        EXPECT_EQ(layer.Read(), image);
      }
    }
  }
}

TEST_P(BackendTest, RotateQueriesTurnsRowsToTheirPlacesAndCopiesThoseWithoutOne) {
  std::mt19937 rng(4);
  KvShape shape;
  shape.num_query_heads = 6;
  shape.num_kv_heads = 2;
  shape.head_dim = 72;
  const std::vector<float> from = RandomFloats(rng, 5 * 6 * 72);
  const std::vector<int32_t> places = {7, kNoPlace, 0, 49, kNoPlace};
  const DeviceBuffer queries = Upload(backend(), from);
  const DeviceBuffer to = Upload(backend(), std::vector<float>(from.size(), NAN));
  const DeviceBuffer angles = Upload(backend(), Angles(72));
  Stream stream;
  const absl::Status status = backend().RotateQueries(shape,
                                                      {.from = queries.As<float>(),
                                                       .to = to.As<float>(),
                                                       .places = places,
                                                       .angles = angles.As<float>()},
                                                      stream);
  ASSERT_TRUE(status.ok()) << status;
  const std::vector<float> turned = Download<float>(backend(), to);
  for (int row = 0; row < 5; ++row) {
    for (int head = 0; head < 6; ++head) {
      const auto first = (row * 6 + head) * 72;
      const std::vector<float> want(from.begin() + first, from.begin() + first + 72);
      const std::vector<float> got(turned.begin() + first, turned.begin() + first + 72);
      if (places[row] <= 0) {  // to place 0 nothing turns either
        EXPECT_EQ(got, want);
      } else {
        ExpectNearStored(got, Turned(want, places[row]), KvDtype::kFloat32);
      }
    }
  }
}

}  // namespace
}  // namespace heavywater
