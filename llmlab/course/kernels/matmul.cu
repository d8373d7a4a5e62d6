// C = A · B in fp32, row by row in memory: A is (m, k), B is (k, n), C is (m, n).
// Twice: each thread fetches all it needs itself; then a block of threads fetches tiles for all of them.

constexpr int TILE = 32;  // a block is TILE × TILE threads, and makes as many values of C

__global__ void matmul_naive(const float* a, const float* b, float* c, int m, int n, int k) {
    const int row = blockIdx.y * TILE + threadIdx.y;
    const int column = blockIdx.x * TILE + threadIdx.x;  // neighbouring threads, neighbouring columns
    if (row >= m || column >= n) return;
    float sum = 0.0f;
    for (int i = 0; i < k; ++i)
        sum += a[static_cast<long long>(row) * k + i] * b[static_cast<long long>(i) * n + column];
    c[static_cast<long long>(row) * n + column] = sum;
}

__global__ void matmul_tiled(const float* a, const float* b, float* c, int m, int n, int k) {
    __shared__ float tile_a[TILE][TILE], tile_b[TILE][TILE];
    const int x = threadIdx.x, y = threadIdx.y;
    const int row = blockIdx.y * TILE + y, column = blockIdx.x * TILE + x;
    float sum = 0.0f;
    for (int start = 0; start < k; start += TILE) {
        // Each thread fetches one value of each tile; outside the matrices it puts zeros.
        tile_a[y][x] = row < m && start + x < k ? a[static_cast<long long>(row) * k + start + x] : 0.0f;
        tile_b[y][x] = start + y < k && column < n ? b[static_cast<long long>(start + y) * n + column] : 0.0f;
        __syncthreads();  // nobody reads a tile before all of it is there
        for (int i = 0; i < TILE; ++i) sum += tile_a[y][i] * tile_b[i][x];
        __syncthreads();  // nobody overwrites a tile that another still reads
    }
    if (row < m && column < n) c[static_cast<long long>(row) * n + column] = sum;
}
