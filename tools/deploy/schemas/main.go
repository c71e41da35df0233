// SPDX-License-Identifier: Apache-2.0

// Command schemas writes the JSON schemas of the kinds in manifests into the directory that its argument names, from the
// types of k8s.io/api and of the projects that have the other kinds. kubeconform reads them.
package main

import (
	"fmt"
	"os"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: schemas DIRECTORY")
		os.Exit(2)
	}
	if err := writeSchemas(os.Args[1]); err != nil {
		fmt.Fprintf(os.Stderr, "schemas: %v\n", err)
		os.Exit(1)
	}
}
