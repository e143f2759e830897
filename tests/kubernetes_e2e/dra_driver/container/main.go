// What runs in the containers of the tests: the only file of their image.
//
// Usage: container pause | container devices
//
// Both wait for the signal to end. "devices" first prints a JSON object: the device files in /dev
// with their numbers, and for each of the devices named in $TRY, as MAJOR:MINOR separated by
// commas, what opening it says. The kernel has no driver for them: a device that the container may
// use is "no such device or address", one that it may not is "operation not permitted".
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
)

type report struct {
	Devices map[string]string `json:"devices"`
	Opened  map[string]string `json:"opened"`
}

func major(device uint64) uint64 { return (device>>8)&0xfff | (device>>32)&^uint64(0xfff) }
func minor(device uint64) uint64 { return device&0xff | (device>>12)&0xffffff00 }

func devices() map[string]string {
	found := map[string]string{}
	_ = filepath.Walk("/dev", func(path string, info os.FileInfo, err error) error {
		if err != nil || info.Mode()&os.ModeCharDevice == 0 {
			return nil
		}
		if status, ok := info.Sys().(*syscall.Stat_t); ok {
			found[path] = fmt.Sprintf("%d:%d", major(status.Rdev), minor(status.Rdev))
		}
		return nil
	})
	return found
}

func open(numbers string) string {
	var first, second uint64
	if _, err := fmt.Sscanf(numbers, "%d:%d", &first, &second); err != nil {
		return err.Error()
	}
	path := "/dev/try-" + strings.ReplaceAll(numbers, ":", "-")
	device := int(second&0xff | (first&0xfff)<<8 | (second&^uint64(0xff))<<12)
	if err := syscall.Mknod(path, syscall.S_IFCHR|0o666, device); err != nil {
		return "not made: " + err.Error()
	}
	defer os.Remove(path)
	file, err := syscall.Open(path, syscall.O_RDWR, 0)
	if err != nil {
		return err.Error()
	}
	syscall.Close(file)
	return "opened"
}

func main() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT)
	if len(os.Args) > 1 && os.Args[1] == "devices" {
		told := report{Devices: devices(), Opened: map[string]string{}}
		for _, numbers := range strings.Split(os.Getenv("TRY"), ",") {
			if numbers != "" {
				told.Opened[numbers] = open(numbers)
			}
		}
		if json.NewEncoder(os.Stdout).Encode(told) != nil {
			os.Exit(1)
		}
	}
	<-ended
}
