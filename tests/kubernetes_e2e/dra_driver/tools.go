//go:build tools

// Package dradriver names NVIDIA's DRA driver, which the Kubernetes tests run on the fake NVML.
package dradriver

import _ "sigs.k8s.io/dra-driver-nvidia-gpu/cmd/gpu-kubelet-plugin"
