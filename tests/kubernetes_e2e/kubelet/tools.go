//go:build tools

// Package kubelet names the kubelet of the Kubernetes tests.
package kubelet

import _ "k8s.io/kubernetes/cmd/kubelet"
