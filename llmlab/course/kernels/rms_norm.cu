// RMSNorm forward in CUDA C++. It spells out what Triton's compiler decides: which
// thread reads which value, and how 256 threads add up one sum.

constexpr int THREADS = 256;  // per block; one block per row

template <typename T>
__global__ void rms_norm_forward(const T* x, const T* weight, T* y, float* inverse_rms,
                                 long long stride, int columns, float eps) {
    __shared__ float sums[THREADS];
    const T* row = x + blockIdx.x * stride;  // 64 bits: rows · columns passes 2^31
    T* out = y + static_cast<long long>(blockIdx.x) * columns;

    // Neighbouring threads read neighbouring values: 32 reads are one request.
    float sum = 0.0f;
    for (int i = threadIdx.x; i < columns; i += THREADS) {
        const float value = static_cast<float>(row[i]);
        sum += value * value;
    }
    sums[threadIdx.x] = sum;

    // 256 sums, 128, 64, ... 1. The barrier: no thread reads a sum before it is written.
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();

    const float scale = 1.0f / sqrtf(sums[0] / columns + eps);
    if (threadIdx.x == 0) inverse_rms[blockIdx.x] = scale;
    // Read the row again, from the cache: the compiler cannot keep a row of unknown length in registers.
    for (int i = threadIdx.x; i < columns; i += THREADS) {
        const float value = static_cast<float>(row[i]);
        out[i] = static_cast<T>(value * scale * static_cast<float>(weight[i]));
    }
}
