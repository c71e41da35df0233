// SPDX-License-Identifier: Apache-2.0

// Command alltests runs the tests of all modules. Its last lines are the failed tests, each as the
// command that runs it alone. Flags are those of go test; with -v passed tests print, too:
//
//	go run ./e2e/alltests -v
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"sync"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

func main() {
	r := report{out: os.Stdout, verbose: slices.Contains(os.Args[1:], "-v")}
	limit := timelimit.Scale(20 * time.Minute)
	began := time.Now()
	errs := make([]error, 2)
	var all sync.WaitGroup
	// Most tests of this module wait most of the time, so the tests of the tools run beside them.
	for i, modules := range [][]string{{"."}, {"tools/deploy", "tools/bench", "tools/release"}} {
		all.Go(func() {
			for _, module := range modules {
				errs[i] = errors.Join(errs[i], r.test(module, limit))
			}
		})
	}
	all.Wait()
	err := errors.Join(errs...)
	if err != nil {
		fmt.Println(err)
	}
	if !r.end(time.Since(began)) || err != nil {
		os.Exit(1)
	}
}

// test runs the tests of a module. Its error is that of go test.
func (r *report) test(module string, limit time.Duration) error {
	args := []string{"-C", module, "test", "-json", "-count=1", "-timeout=" + limit.String()}
	c := exec.Command("go", slices.Concat(args, os.Args[1:], []string{"./..."})...)
	c.Stderr = os.Stderr
	events, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return err
	}
	lines := bufio.NewReader(events)
	for err == nil {
		var line []byte
		if line, err = lines.ReadBytes('\n'); len(line) > 0 {
			r.add(line)
		}
	}
	if !errors.Is(err, io.EOF) {
		return errors.Join(err, c.Wait())
	}
	if err := c.Wait(); err != nil {
		return fmt.Errorf("go test in %s: %w", module, err)
	}
	return nil
}
