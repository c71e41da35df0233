// SPDX-License-Identifier: Apache-2.0

// Command check reads manifests, a stream of YAML documents, from its standard input and validates
// them as the API server would: unknown fields and wrong types. Its tests evaluate alerts and the dashboard as
// Prometheus does. It is a separate module, so that the project does not depend on Kubernetes and Prometheus.
package main

import (
	"fmt"
	"os"
)

func main() {
	mistakes := check(os.Stdin)
	for _, err := range mistakes {
		fmt.Fprintf(os.Stderr, "check: %v\n", err)
	}
	if len(mistakes) > 0 {
		os.Exit(1)
	}
}
