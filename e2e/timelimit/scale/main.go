// SPDX-License-Identifier: Apache-2.0

// Command scale prints a limit on time, such as 20m, as it is on this machine now:
//
//	go test -timeout $(go run ./e2e/timelimit/scale 15m) ./e2e/runtimes/...
package main

import (
	"fmt"
	"os"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: scale LIMIT")
		os.Exit(2)
	}
	limit, err := time.ParseDuration(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(2)
	}
	fmt.Println(timelimit.Scale(limit))
}
