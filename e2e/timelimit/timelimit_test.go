// SPDX-License-Identifier: Apache-2.0

package timelimit_test

import (
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

func TestLimits(t *testing.T) {
	if timelimit.Exceeded(time.Millisecond, time.Millisecond) {
		t.Error("a duration equal to the limit exceeds it")
	}
	if !timelimit.Exceeded(timelimit.Most*time.Second+1, time.Second) {
		t.Errorf("a duration of more than %d times the limit does not exceed it", timelimit.Most)
	}
	if got := timelimit.Fair(time.Second, time.Second); got != time.Second {
		t.Errorf("a duration equal to the limit is scaled to %s", got)
	}
	if got := timelimit.Fair(time.Hour, time.Second); got < time.Hour/timelimit.Most || got > time.Hour {
		t.Errorf("an hour is %s, want an hour divided by 1 to %d", got, timelimit.Most)
	}
	tries := 0
	if !timelimit.Await(0, func() bool { tries++; return tries == 1 }) || timelimit.Await(0, func() bool { return false }) {
		t.Error("Await does not report whether the condition holds")
	}
}

// TestLoad checks that limits are longer on an overloaded machine.
func TestLoad(t *testing.T) {
	for range 6 * runtime.NumCPU() {
		c := exec.Command("sh", "-c", "while :; do :; done")
		c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := c.Process.Kill(); err != nil {
				t.Error(err)
			}
			_ = c.Wait() // the error is that it was killed
		})
	}
	most := 0.0
	for range 5 {
		most = max(most, timelimit.Factor())
	}
	t.Logf("%.1f times slower", most)
	if most < 2 {
		t.Errorf("the machine is %.1f times slower than an idle one", most)
	}
}
