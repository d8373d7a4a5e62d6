// The function that Python calls: it allocates the results and launches the kernel on PyTorch's current stream.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

torch::Tensor rms_norm(torch::Tensor x, torch::Tensor weight, double eps) {
    const c10::cuda::CUDAGuard guard(x.device());
    auto y = torch::empty(x.sizes(), x.options());
    auto inverse_rms = torch::empty({x.size(0)}, x.options().dtype(torch::kFloat));
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "rms_norm", [&] {
        rms_norm_forward<scalar_t><<<x.size(0), THREADS, 0, c10::cuda::getCurrentCUDAStream()>>>(
            x.data_ptr<scalar_t>(), weight.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), inverse_rms.data_ptr<float>(),
            x.stride(0), x.size(1), eps);
    });
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return y;
}
