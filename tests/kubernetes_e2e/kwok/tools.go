//go:build tools

// Package kwok names the program that plays the nodes in the Kubernetes tests.
package kwok

import _ "sigs.k8s.io/kwok/cmd/kwok"
