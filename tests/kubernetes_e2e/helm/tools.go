//go:build tools

// Package helm names the program that renders the chart in the Kubernetes tests.
package helm

import _ "helm.sh/helm/v4/cmd/helm"
