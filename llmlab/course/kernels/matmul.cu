// y = x · w in fp32: x is (T, p), w is (p, q), y is (T, q), and all are stored row by row.
// In the first kernel each thread loads all its values itself. In the second one a block loads tiles for all its threads.

constexpr int TILE = 32;  // a block has TILE × TILE threads, and each of them computes one value of y

__global__ void matmul_naive(const float* x, const float* w, float* y, int T, int p, int q) {
    const int row = blockIdx.y * TILE + threadIdx.y;
    const int column = blockIdx.x * TILE + threadIdx.x;  // neighboring threads compute neighboring columns
    if (row >= T || column >= q) return;
    float sum = 0.0f;
    for (int i = 0; i < p; ++i)
        sum += x[static_cast<long long>(row) * p + i] * w[static_cast<long long>(i) * q + column];
    y[static_cast<long long>(row) * q + column] = sum;
}

__global__ void matmul_tiled(const float* x, const float* w, float* y, int T, int p, int q) {
    __shared__ float x_tile[TILE][TILE], w_tile[TILE][TILE];
    const int lane = threadIdx.x, warp = threadIdx.y;
    const int row = blockIdx.y * TILE + warp, column = blockIdx.x * TILE + lane;
    float sum = 0.0f;
    for (int start = 0; start < p; start += TILE) {
        // Each thread loads one value of each tile, and stores zeros outside of the matrices.
        const int i = start + lane, j = start + warp;
        x_tile[warp][lane] = row < T && i < p ? x[static_cast<long long>(row) * p + i] : 0.0f;
        w_tile[warp][lane] = j < p && column < q ? w[static_cast<long long>(j) * q + column] : 0.0f;
        __syncthreads();  // no thread reads a tile before it is complete
        for (int k = 0; k < TILE; ++k) sum += x_tile[warp][k] * w_tile[k][lane];
        __syncthreads();  // no thread overwrites a tile that another one still reads
    }
    if (row < T && column < q) y[static_cast<long long>(row) * q + column] = sum;
}
