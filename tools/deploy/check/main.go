// SPDX-License-Identifier: Apache-2.0

// Command check reads manifests, a stream of YAML documents, from its standard input and validates
// them as the API server and Prometheus would: unknown fields, wrong types, and expressions and
// templates that do not parse. It writes the expressions and their metrics as JSON to its standard
// output. It is a separate module, so that the project does not depend on Kubernetes and
// Prometheus.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
)

func main() { os.Exit(run(os.Stdin, os.Stdout, os.Stderr)) }

func run(in io.Reader, out, mistakes io.Writer) int {
	r := check(in)
	for _, err := range r.mistakes {
		fmt.Fprintf(mistakes, "check: %v\n", err)
	}
	if err := json.NewEncoder(out).Encode(r); err != nil {
		fmt.Fprintf(mistakes, "check: write result: %v\n", err)
		return 1
	}
	if len(r.mistakes) > 0 {
		return 1
	}
	return 0
}
